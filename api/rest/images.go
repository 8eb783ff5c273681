package rest

// Image is a built root file system.
type Image struct {
	ID            string   `json:"id"`
	Name          string   `json:"name"`
	CreatedAtUnix int64    `json:"created_at_unix"`
	Source        string   `json:"source"`
	Packages      []string `json:"packages"`
	DiskMiB       int      `json:"disk_mib"`
	Bytes         int64    `json:"bytes"` // physical
	Digest        string   `json:"digest"`
	Kernel        string   `json:"kernel"`
	Builtin       bool     `json:"builtin"`
	UsedBy        []string `json:"used_by"` // snapshot ids
}

// BuildImage is the body of POST /v1/images: an image of Debian with packages. For
// a root file system of one's own the body is a tar archive instead: its first
// entry, request.json, is this object, and what follows it is the root file system
// as a tar archive, plain or compressed by gzip, zstd or xz.
type BuildImage struct {
	Name     string   `json:"name"`
	Replace  bool     `json:"replace,omitempty"`
	Packages []string `json:"packages,omitempty"`
	DiskMiB  int      `json:"disk_mib,omitempty"` // 4096 if 0
	Kernel   string   `json:"kernel,omitempty"`   // name of a kernel; Debian's if absent
}

// Kernel is a guest kernel. Debian's has no name.
type Kernel struct {
	Name          string   `json:"name"`
	Digest        string   `json:"digest"`
	Release       string   `json:"release"`
	Package       string   `json:"package,omitempty"`
	Modules       int      `json:"modules"`
	Bytes         int64    `json:"bytes"`
	Default       bool     `json:"default"` // images get it that ask for none
	CreatedAtUnix int64    `json:"created_at_unix"`
	UsedBy        []string `json:"used_by"` // image ids
}

// AddKernel is the first entry, request.json, of the tar archive that is the body
// of POST /v1/kernels. The others are the file kernel (an ELF vmlinux or a bzImage)
// and, unless the drivers of a guest are built in, modules/ with what lies in
// lib/modules/RELEASE.
type AddKernel struct {
	Name string `json:"name"`
}

// ImageLine is one line of a streamed image build. Progress is set, or Done is
// true, the line is the last one, and Image or Error is set.
type ImageLine struct {
	Progress *Progress `json:"progress,omitempty"`
	Done     bool      `json:"done,omitempty"`
	Image    *Image    `json:"image,omitempty"`
	Error    string    `json:"error,omitempty"`
	Code     string    `json:"code,omitempty"`
	Hint     string    `json:"hint,omitempty"`
}
