package kernel

import (
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// maxModule bounds one unpacked module; the largest here has about 1 MiB.
const maxModule = 64 << 20

// maxModules bounds what one wish can pull in by dependencies.
const maxModules = 99

// Module is one loadable module, unpacked.
type Module struct {
	Name string // as its file is named, without ".ko"
	Data []byte
}

// Wish names a module a guest needs. An optional one may be missing.
type Wish struct {
	Name     string
	Optional bool
}

// GuestModules is what a forkd guest needs: its devices by virtio-mmio, its file
// systems, and a network card if the kernel has the driver.
func GuestModules() []Wish {
	return []Wish{
		{Name: "virtio_ring"}, {Name: "virtio"}, {Name: "virtio_mmio"}, {Name: "virtio_blk"},
		{Name: "virtio_console"}, {Name: "virtio-rng"}, {Name: "ext4"}, {Name: "overlay"},
		{Name: "failover", Optional: true}, {Name: "net_failover", Optional: true}, {Name: "virtio_net", Optional: true},
	}
}

// Modules reads the wished modules and what they depend on from the directory of
// a kernel's modules (lib/modules/RELEASE), in an order in which they load. What
// is built into the kernel is left out; a missing module is ErrUnsupported.
//
// Dependencies are read from the modules themselves: modules.dep is made only
// when a package is installed.
func Modules(ctx context.Context, dir string, wishes []Wish) ([]Module, error) {
	r, err := newResolver(os.DirFS(dir))
	if err != nil {
		return nil, fmt.Errorf("read kernel modules in %s: %w", dir, err)
	}
	for _, w := range wishes {
		if err := r.add(ctx, w.Name, w.Optional); err != nil {
			return nil, fmt.Errorf("find kernel module %s: %w", w.Name, err)
		}
	}
	return r.order, nil
}

type resolver struct {
	fsys    fs.FS
	files   map[string]string // canonical name -> path
	builtin map[string]bool
	state   map[string]visit
	order   []Module
}

type visit int

const (
	visiting visit = iota + 1
	visited
)

func newResolver(fsys fs.FS) (*resolver, error) {
	r := &resolver{fsys: fsys, files: map[string]string{}, builtin: map[string]bool{}, state: map[string]visit{}}
	list, err := fs.ReadFile(fsys, "modules.builtin")
	if err != nil {
		return nil, errdefs.New(errdefs.ErrCorrupt, "read list of built-in modules: %w", err)
	}
	for line := range strings.Lines(string(list)) {
		r.builtin[canonical(moduleName(strings.TrimSpace(line)))] = true
	}
	err = fs.WalkDir(fsys, ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := moduleName(p); name != "" && d.Type().IsRegular() {
			r.files[canonical(name)] = p
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list modules: %w", err)
	}
	return r, nil
}

// add appends name after everything it depends on.
func (r *resolver) add(ctx context.Context, name string, optional bool) error {
	key := canonical(name)
	switch {
	case r.builtin[key] || r.state[key] == visited:
		return nil
	case r.state[key] == visiting:
		return errdefs.New(errdefs.ErrCorrupt, "module %s depends on itself", name)
	case ctx.Err() != nil:
		return ctx.Err()
	case len(r.order) >= maxModules:
		return errdefs.New(errdefs.ErrCorrupt, "more than %d modules are needed", maxModules)
	}
	file, ok := r.files[key]
	if !ok && optional {
		return nil
	}
	if !ok {
		return errdefs.New(errdefs.ErrUnsupported, "the kernel has no module %s, neither as a file nor built in", name)
	}
	r.state[key] = visiting
	data, err := r.read(ctx, file)
	if err != nil {
		return err
	}
	info, err := readModinfo(data)
	if err != nil {
		return fmt.Errorf("read %s: %w", file, err)
	}
	for _, dep := range info.depends {
		if err := r.add(ctx, dep, false); err != nil {
			return err
		}
	}
	for _, dep := range info.softPre {
		if err := r.add(ctx, dep, true); err != nil {
			return err
		}
	}
	r.state[key] = visited
	r.order = append(r.order, Module{Name: moduleName(file), Data: data})
	return nil
}

func (r *resolver) read(ctx context.Context, file string) ([]byte, error) {
	data, err := fs.ReadFile(r.fsys, file)
	if err != nil {
		return nil, fmt.Errorf("read module: %w", err)
	}
	if strings.HasSuffix(file, ".ko") {
		return data, nil
	}
	if data, err = Decompress(ctx, data, maxModule); err != nil {
		return nil, fmt.Errorf("unpack %s: %w", file, err)
	}
	return data, nil
}

// moduleName returns the name of the module in file p, or "" if p is none.
func moduleName(p string) string {
	name, ext, _ := strings.Cut(path.Base(p), ".ko")
	switch ext {
	case "", ".xz", ".zst", ".gz":
		if strings.Contains(path.Base(p), ".ko") {
			return name
		}
	}
	return ""
}

// canonical makes names equal that the kernel takes for equal.
func canonical(name string) string { return strings.ReplaceAll(name, "-", "_") }

type modinfo struct {
	depends []string
	softPre []string // to be loaded before, if they exist
}

// readModinfo reads what a module says about itself in its .modinfo section.
func readModinfo(module []byte) (modinfo, error) {
	f, err := elf.NewFile(bytes.NewReader(module))
	if err != nil {
		return modinfo{}, errdefs.New(errdefs.ErrCorrupt, "read module as ELF: %w", err)
	}
	section := f.Section(".modinfo")
	if section == nil || section.Type != elf.SHT_PROGBITS || section.Flags&elf.SHF_COMPRESSED != 0 || section.FileSize > uint64(len(module)) {
		return modinfo{}, errdefs.New(errdefs.ErrCorrupt, "module has no section .modinfo")
	}
	text, err := section.Data()
	if err != nil {
		return modinfo{}, errdefs.New(errdefs.ErrCorrupt, "read section .modinfo: %w", err)
	}
	var info modinfo
	for field := range strings.SplitSeq(string(text), "\x00") {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "depends":
			for dep := range strings.SplitSeq(value, ",") {
				if dep != "" {
					info.depends = append(info.depends, dep)
				}
			}
		case "softdep":
			if pre, ok := strings.CutPrefix(value, "pre:"); ok {
				pre, _, _ = strings.Cut(pre, "post:")
				info.softPre = append(info.softPre, strings.Fields(pre)...)
			}
		}
	}
	return info, nil
}
