package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/errdefs"
)

// mib is a flag for a size: 512, 512M, 512MiB, 2G or 2GiB, counted in MiB.
type mib int

func (m *mib) String() string {
	if *m == 0 {
		return ""
	}
	return strconv.Itoa(int(*m))
}

func (m *mib) Type() string { return "MiB" }

func (m *mib) Set(text string) error {
	number, factor := strings.TrimSpace(text), 1
	for _, unit := range []struct {
		suffix string
		factor int
	}{{"MiB", 1}, {"GiB", 1024}, {"TiB", 1 << 20}, {"M", 1}, {"G", 1024}, {"T", 1 << 20}} {
		if rest, ok := strings.CutSuffix(number, unit.suffix); ok {
			number, factor = strings.TrimSpace(rest), unit.factor
			break
		}
	}
	n, err := strconv.Atoi(number)
	if err != nil || n <= 0 || n > (1<<30)/factor {
		return fmt.Errorf("%.40q is not a size: write 512, 512M or 2G", text)
	}
	*m = mib(n * factor)
	return nil
}

// shape is the flags of a machine's size.
type shape struct {
	cpus         int
	memory, disk mib
}

func (s *shape) register(cmd *cobra.Command, note string) {
	cmd.Flags().IntVar(&s.cpus, "cpus", 0, "virtual CPUs, 1 to 8"+note)
	cmd.Flags().Var(&s.memory, "memory", "memory in MiB, or as 2G"+note)
	cmd.Flags().Var(&s.disk, "disk", "disk in MiB, or as 8G"+note)
}

// assignments turns k=v flags into a map. A bare k takes its value from getenv,
// which keeps secrets out of the process list; nil getenv refuses that.
func assignments(flag string, list []string, getenv func(string) string) (map[string]string, error) {
	if len(list) == 0 {
		return nil, nil
	}
	out := make(map[string]string, len(list))
	for _, item := range list {
		key, value, ok := strings.Cut(item, "=")
		switch {
		case key == "" || (!ok && getenv == nil):
			return nil, errdefs.New(errdefs.ErrInvalid, "--%s %.80q is not of the form KEY=VALUE", flag, key)
		case !ok:
			value = getenv(key)
		}
		out[key] = value
	}
	return out, nil
}

// seconds turns a time-out flag into the API's optional field; 0 is its default.
func seconds(d time.Duration) (*float64, error) {
	if d < 0 {
		return nil, errdefs.New(errdefs.ErrInvalid, "--timeout %s is negative", d)
	}
	if d == 0 {
		return nil, nil
	}
	s := d.Seconds()
	return &s, nil
}

// oneRef takes a reference as argument or by the old spelling of a flag.
func oneRef(args []string, flag, value string) (string, error) {
	switch {
	case len(args) == 1 && value == "":
		return args[0], nil
	case len(args) == 0 && value != "":
		return value, nil
	case len(args) == 0:
		return "", errdefs.New(errdefs.ErrInvalid, "name a snapshot: by id, tag, or --%s", flag)
	}
	return "", errdefs.New(errdefs.ErrInvalid, "%q and --%s %q are both given", args[0], flag, value)
}
