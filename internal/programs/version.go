package programs

import "runtime/debug"

// stamp is set by the linker: -X forkd.dev/forkd/internal/programs.stamp=VERSION.
var stamp string // written by the linker only

// Version returns the version this program was built as: the linker's stamp, or
// what Go recorded about the commit, or "devel".
func Version() string {
	if stamp != "" {
		return stamp
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	const short = 12
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= short {
			return "devel-" + s.Value[:short]
		}
	}
	return "devel"
}
