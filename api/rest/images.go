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

// BuildImage is the body of POST /v1/images: an image of Debian with packages.
type BuildImage struct {
	Name     string   `json:"name"`
	Replace  bool     `json:"replace,omitempty"`
	Packages []string `json:"packages,omitempty"`
	DiskMiB  int      `json:"disk_mib,omitempty"` // 4096 if 0
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
