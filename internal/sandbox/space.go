package sandbox

import (
	"strconv"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// checkSpace refuses work that would store need bytes, or an unknown amount if 0,
// while the disk has no room for it. A full disk would stop the journal, and with it
// every sandbox's life.
func (s *Service) checkSpace(what string, need int64) error {
	if s.cfg.MinFreeBytes < 0 {
		return nil
	}
	disk, err := linux.ReadDisk(s.cfg.Dir)
	if err != nil {
		return err
	}
	if disk.AvailableBytes-need >= s.cfg.MinFreeBytes {
		return nil
	}
	amount := ""
	if need > 0 {
		amount = " of " + mib(need)
	}
	return errdefs.WithHint(
		errdefs.New(errdefs.ErrResourceExhausted, "cannot %s%s: %s of the disk are free and %s are kept free", what, amount, mib(disk.AvailableBytes), mib(s.cfg.MinFreeBytes)),
		"look with: forkd df, free some with: forkd prune or forkd snapshot rm, or lower --min-free")
}

func mib(bytes int64) string { return strconv.FormatInt(bytes>>20, 10) + " MiB" }
