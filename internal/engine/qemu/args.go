package qemu

import (
	"fmt"
	"os"
	"strconv"

	"forkd.dev/forkd/internal/engine"
)

// agentPort is the name of the virtio port the agent looks for.
const agentPort = "org.forkd.agent"

// consoleBytes is what is kept of the guest's console. A ring in QEMU's memory
// cannot fill a disk of the host, however much the guest prints.
const consoleBytes = 64 << 10

// keptConsole is what the daemon keeps of a console that somebody reads.
const keptConsole = 4 * consoleBytes

// fdTable collects the files a QEMU process inherits; the first is descriptor 3.
type fdTable struct{ files []*os.File }

func (t *fdTable) add(f *os.File) int {
	t.files = append(t.files, f)
	return 2 + len(t.files)
}

// process is everything a QEMU command line is made of.
type process struct {
	name     string // -name: forkd-<installation>-<id>
	shape    engine.Shape
	memory   *os.File // sealed
	qmp      *os.File // listening
	agent    *os.File // listening
	overlay  overlayFiles
	disks    []diskFile // below the overlay, topmost last
	kernel   string     // only for a boot
	initrd   string     // only for a boot
	cmdline  string     // only for a boot
	incoming bool       // start stopped, waiting for device state
	confine  confinement
	merges   bool // no guest: a process that merges disks into overlay
}

// diskFile is a read-only file below a machine's overlay.
type diskFile struct {
	file   *os.File
	format string // "raw" or "qcow2"
}

// args returns the command line and the files it refers to by number.
func (p *process) args() ([]string, *fdTable) {
	if p.merges {
		return p.mergeArgs()
	}
	fds := &fdTable{}
	mem := fds.add(p.memory)
	qmp := fds.add(p.qmp)
	agent := fds.add(p.agent)
	a := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-name", p.name,
		"-machine", "microvm,acpi=on,rtc=on,pcie=off,pit=off,pic=off,isa-serial=on,auto-kernel-cmdline=off,memory-backend=ram",
		"-accel", fmt.Sprintf("tcg,thread=multi,tb-size=%d", translationMiB),
		"-cpu", "max",
		"-smp", strconv.Itoa(p.shape.CPUs),
		"-m", fmt.Sprintf("%dM", p.shape.MemoryMiB),
		"-object", fmt.Sprintf("memory-backend-file,id=ram,size=%dM,mem-path=/proc/self/fd/%d,share=off", p.shape.MemoryMiB, mem),
		"-chardev", fmt.Sprintf("socket,id=qmp,fd=%d,server=on,wait=off", qmp),
		"-mon", "chardev=qmp,mode=control",
		"-chardev", fmt.Sprintf("socket,id=agent,fd=%d,server=on,wait=off", agent),
		"-chardev", fmt.Sprintf("ringbuf,id=console,size=%d", consoleBytes),
		"-serial", "chardev:console",
	}
	a = append(a, p.diskArgs(fds)...)
	a = append(a,
		"-device", "virtio-blk-device,drive="+overlayNode(0),
		"-device", "virtio-serial-device,max_ports=2",
		"-device", "virtserialport,chardev=agent,name="+agentPort,
	)
	if p.incoming {
		a = append(a, "-S", "-incoming", "defer", "-global", "migration.send-configuration=off")
	} else {
		a = append(a, "-kernel", p.kernel, "-initrd", p.initrd, "-append", p.cmdline)
	}
	return append(a, p.confine.args()...), fds
}

// diskArgs stacks the disk files as block nodes. Files come as descriptor sets, so
// QEMU needs no path; access modes match those the descriptors were opened with,
// and locking is off because each overlay belongs to one machine by construction.
func (p *process) diskArgs(fds *fdTable) []string {
	var a []string
	backing := ""
	for i, d := range p.disks {
		set := i + 2
		a = append(a, "-add-fd", fmt.Sprintf("fd=%d,set=%d", fds.add(d.file), set))
		node := fmt.Sprintf("disk%d", i)
		opt := fmt.Sprintf("driver=%s,node-name=%s,read-only=on,file.driver=file,file.filename=/dev/fdset/%d,file.read-only=on,file.locking=off", d.format, node, set)
		if backing != "" {
			opt += ",backing=" + backing
		}
		a = append(a, "-blockdev", opt)
		backing = node
	}
	// Both descriptors, because QEMU opens an overlay anew for reading once a
	// capture has put another one on top of it.
	a = append(a,
		"-add-fd", fmt.Sprintf("fd=%d,set=1,opaque=%s", fds.add(p.overlay.rw), opaqueWritable),
		"-add-fd", fmt.Sprintf("fd=%d,set=1,opaque=%s", fds.add(p.overlay.ro), overlayNode(0)),
		"-blockdev", "driver=qcow2,node-name="+overlayNode(0)+",discard=unmap,file.driver=file,file.node-name="+fileNode(overlayNode(0))+
			",file.filename=/dev/fdset/1,file.locking=off,file.auto-read-only=on,file.discard=unmap,backing="+backing)
	return a
}

// overlayNode is the name of the block node of a machine's i-th overlay.
func overlayNode(i int) string { return fmt.Sprintf("overlay%d", i) }

// fileNode is the name of the node of the file below an overlay's node.
func fileNode(node string) string { return node + "-file" }

// Marks of writable descriptors in QEMU's descriptor sets.
const (
	opaqueWritable = "writable" // of an overlay
	opaqueState    = "state"    // of the device state of a capture
)

// overlayFiles is one qcow2 file opened for writing and for reading.
type overlayFiles struct{ rw, ro *os.File }

// kernelCmdline is for a boot under TCG. tsc_early_khz is the host's TSC rate,
// without which microvm hangs in most boots; THP and watchdogs are off because
// they dirty memory and burn CPU in every idle fork; mitigations guard against
// speculation, which an emulated CPU does not do. The third line turns off what
// each fork would have to translate without being better for it: scheduling groups
// per session, bookkeeping of interrupts, and hardening of the guest's kernel
// against its own users, who are root of their machine.
func kernelCmdline(tscKHz uint64) string {
	return fmt.Sprintf("console=ttyS0 loglevel=4 panic=-1 reboot=t tsc=reliable tsc_early_khz=%d "+
		"random.trust_cpu=on nowatchdog no_timer_check psi=0 cgroup_disable=memory mitigations=off audit=0 lsm= "+
		"noautogroup noirqdebug preempt=none hardened_usercopy=off init_on_alloc=0 randomize_kstack_offset=off "+
		"transparent_hugepage=never cgroup_no_v1=all forkd.root=/dev/vda", tscKHz)
}
