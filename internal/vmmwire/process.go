package vmmwire

import (
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// Descriptors that every forkd-vmm process is started with; 0 to 2 are /dev/null and
// its log, there are no others. Root is there only if Process.UID is not 0.
const (
	FDControl = 3 // listening unix socket, SOCK_SEQPACKET
	FDKVM     = 4 // /dev/kvm, opened read-write: the process could not open it any more
	FDRoot    = 5 // empty directory that becomes the root directory
)

// Process is the command line of forkd-vmm: for whom it is prepared and how it locks
// itself in before it reads its first message. It starts as the daemon's user in
// namespaces of its own; what it cannot apply it says in Hello.Lost, except that a
// uid that cannot be taken ends it.
type Process struct {
	// Name is what the daemon finds the process by; it has no other meaning.
	Name  string
	Shape Shape
	// UID, if not 0, is the user and group to become after entering FDRoot.
	UID int
	// MaxFiles and MaxFileMiB are limits on descriptors and on the size of files.
	MaxFiles   int
	MaxFileMiB int
}

// Args returns the arguments, without the program.
func (p Process) Args() []string {
	return []string{
		"-name", p.Name, "-cpus", strconv.Itoa(p.Shape.CPUs), "-memory", strconv.Itoa(p.Shape.MemoryMiB),
		"-uid", strconv.Itoa(p.UID), "-files", strconv.Itoa(p.MaxFiles), "-file-mib", strconv.Itoa(p.MaxFileMiB),
	}
}

// ParseProcess reads what Args wrote.
func ParseProcess(args []string) (Process, error) {
	var p Process
	numbers := map[string]*int{
		"-cpus": &p.Shape.CPUs, "-memory": &p.Shape.MemoryMiB, "-uid": &p.UID, "-files": &p.MaxFiles, "-file-mib": &p.MaxFileMiB,
	}
	for len(args) >= 2 {
		key, value := args[0], args[1]
		args = args[2:]
		if key == "-name" {
			p.Name = value
			continue
		}
		to, known := numbers[key]
		n, err := strconv.Atoi(value)
		if !known || err != nil || n < 0 {
			return p, errdefs.New(errdefs.ErrInvalid, "argument %.40s %.40q is not understood", key, value)
		}
		*to = n
	}
	s := p.Shape
	if len(args) > 0 || p.Name == "" || s.CPUs < 1 || s.CPUs > MaxCPUs || s.MemoryMiB < 1 || s.MemoryMiB > MaxMemoryMiB || p.MaxFiles < 1 || p.MaxFileMiB < 1 {
		return p, errdefs.New(errdefs.ErrInvalid, "arguments of forkd-vmm are not complete; it is started by forkd, not by hand")
	}
	return p, nil
}

// NameOf returns the -name of a command line of forkd-vmm, "" if it has none. It is how
// the daemon tells its processes from others.
func NameOf(args []string) string {
	if len(args) < 3 || !strings.HasPrefix(args[0][strings.LastIndexByte(args[0], '/')+1:], "forkd-vmm") || args[1] != "-name" {
		return ""
	}
	return args[2]
}

// Env is the whole environment of a forkd-vmm process. Guest memory lies outside of Go's
// heap, which stays small: collecting it is only a net for what goes wrong. Each vCPU
// keeps a processor of Go's scheduler for short times, devices need one more.
func (p Process) Env() []string {
	return []string{"GOMAXPROCS=" + strconv.Itoa(p.Shape.CPUs+1), "GOGC=off", "GOMEMLIMIT=16MiB", "GOTRACEBACK=single"}
}
