package runsc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// fromDebian downloads the package with an apt configuration of its own and unpacks it.
func fromDebian(ctx context.Context, j *job) error {
	if len(j.cfg.Sources) == 0 {
		return errdefs.New(errdefs.ErrInvalid, "no package source was named")
	}
	apt, err := j.aptOptions()
	if err != nil {
		return err
	}
	j.step("reading the package list of bookworm-backports", -1)
	if err := j.apt(ctx, append(apt, "update")...); err != nil {
		return err
	}
	j.step("downloading the package runsc", -1)
	if err := j.apt(ctx, append(apt, "download", "runsc")...); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(j.dir, "runsc_*.deb"))
	if err != nil || len(debs) != 1 {
		return errdefs.New(errdefs.ErrInternal, "apt downloaded %d packages instead of 1 (%v)", len(debs), err)
	}
	j.step("unpacking "+filepath.Base(debs[0]), -1)
	unpacked := filepath.Join(j.dir, "unpacked")
	if _, err := (tool{name: "dpkg-deb", args: []string{"--extract", debs[0], unpacked}}).run(ctx); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(unpacked, "usr", "bin", Name), j.program()); err != nil {
		return fmt.Errorf("look for runsc in the package: %w", err)
	}
	return nil
}

func (j *job) apt(ctx context.Context, args ...string) error {
	_, err := tool{name: "apt-get", args: args, dir: j.dir, env: []string{"LC_ALL=C", "DEBIAN_FRONTEND=noninteractive"}}.run(ctx)
	if err != nil && ctx.Err() == nil && !errors.Is(err, errdefs.ErrInvalid) {
		return errdefs.WithHint(err, "see that this host reaches Debian's mirrors, or install runsc (%s) by hand and put it into the PATH", "package runsc of bookworm-backports")
	}
	return err
}

// aptOptions makes apt look at nothing but our source and write nowhere but here.
func (j *job) aptOptions() ([]string, error) {
	dir := func(parts ...string) string { return filepath.Join(append([]string{j.dir, "apt"}, parts...)...) }
	for _, d := range []string{dir("parts"), dir("preferences"), dir("state", "lists", "partial"), dir("cache", "archives", "partial")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, fmt.Errorf("prepare apt: %w", err)
		}
	}
	if err := os.WriteFile(dir("sources.list"), []byte(strings.Join(j.cfg.Sources, "\n")+"\n"), 0o644); err != nil {
		return nil, fmt.Errorf("prepare apt: %w", err)
	}
	if err := os.WriteFile(dir("status"), nil, 0o644); err != nil {
		return nil, fmt.Errorf("prepare apt: %w", err)
	}
	var out []string
	for _, o := range []string{
		"Dir::Etc::SourceList=" + dir("sources.list"), "Dir::Etc::SourceParts=" + dir("parts"),
		"Dir::Etc::Preferences=" + dir("no-preferences"), "Dir::Etc::PreferencesParts=" + dir("preferences"),
		"Dir::State=" + dir("state"), "Dir::State::status=" + dir("status"), "Dir::Cache=" + dir("cache"),
		"APT::Architecture=amd64", "APT::Sandbox::User=root", "Acquire::Languages=none", "Acquire::Retries=2",
		// A host's own rules for what happens around apt are not for this.
		"APT::Update::Post-Invoke-Success::=", "Dpkg::Use-Pty=0",
	} {
		out = append(out, "-o", o)
	}
	return append(out, "-q"), nil
}
