package image

import "os"

// HostSources returns lines of sources.list for Debian with the mirrors that this
// host's apt uses.
func HostSources() []string {
	return hostMirrors(os.DirFS("/etc/apt")).lines(debianSuite, debianKeyring)
}
