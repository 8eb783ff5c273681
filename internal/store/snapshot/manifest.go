package snapshot

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"time"
	"unicode/utf8"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// ManifestName is the name of the manifest in a snapshot's directory.
const ManifestName = "manifest.json"

// Version is the manifest version this build writes and reads.
const Version = 1

// MaxManifestBytes bounds a manifest file.
const MaxManifestBytes = 1 << 20

const (
	maxArtifacts = 64
	maxLabels    = 64
	maxLanguages = 16
	maxExec      = 1000
	maxWord      = 128 // of short texts: formats, versions, CPU names
	maxShape     = 1 << 30
)

// Manifest says what a snapshot is. Publish fills Version, Checksum and what is
// missing of the artifacts.
type Manifest struct {
	Version      int               `json:"version"`
	ID           string            `json:"id"`
	ParentID     string            `json:"parent_id,omitempty"`
	CreatedAt    time.Time         `json:"created_at"`
	Image        Image             `json:"image"`
	Compat       engine.Compat     `json:"compat"`
	Isolation    engine.Isolation  `json:"isolation,omitempty"`
	Shape        engine.Shape      `json:"shape"`
	Artifacts    []Artifact        `json:"artifacts"`
	Labels       map[string]string `json:"labels,omitempty"`
	Recipe       Recipe            `json:"recipe"`
	Agent        Agent             `json:"agent"`
	HoldsSecrets bool              `json:"holds_secrets"`
	Disk         DiskState         `json:"disk,omitempty"`
	PauseMs      float64           `json:"pause_ms"`
	Checksum     string            `json:"checksum"`
}

// Image is the root file system a snapshot was booted from.
type Image struct {
	ID     string `json:"id,omitempty"`
	Name   string `json:"name,omitempty"` // when the snapshot was made; it may have moved since
	Digest string `json:"digest,omitempty"`
}

// Artifact is one file of a snapshot.
type Artifact struct {
	engine.Artifact
	Size   int64  `json:"size"`   // length of the file, holes included
	Digest string `json:"digest"` // "sha256:" and 64 hexadecimal digits
}

// Recipe is how a snapshot was made, enough to make it again.
type Recipe struct {
	Image string   `json:"image,omitempty"`
	From  string   `json:"from,omitempty"`
	Warm  string   `json:"warm,omitempty"`
	Exec  []string `json:"exec,omitempty"`
	// AllowHosts are the hosts beside the registries of its host that it needs.
	AllowHosts []string `json:"allow_hosts,omitempty"`
	// Files is the SHA-256 of the archive of files that were copied in.
	Files string `json:"files,omitempty"`
	Start *Start `json:"start,omitempty"`
}

// Start is a program that runs on in every fork.
type Start struct {
	Command      string            `json:"command"`
	Ready        string            `json:"ready,omitempty"`
	ReadyPort    int               `json:"ready_port,omitempty"`
	ReadyLog     string            `json:"ready_log,omitempty"`
	ReadyTimeout float64           `json:"ready_timeout_secs,omitempty"`
	Env          map[string]string `json:"env,omitempty"`
	Cwd          string            `json:"cwd,omitempty"`
	User         string            `json:"user,omitempty"`
}

// Agent is what runs in the captured guest.
type Agent struct {
	Protocol      int      `json:"protocol"`
	WarmLanguages []string `json:"warm_languages,omitempty"`
	// RunnerQuiet: no runner had extra threads or child processes, so that a pool
	// may hold restored copies.
	RunnerQuiet bool `json:"runner_quiet"`
}

// DiskState says in what state the file systems of the guest were.
type DiskState string

// The disk states.
const (
	DiskSynced  DiskState = "synced"  // all written before the capture
	DiskJournal DiskState = "journal" // as after a loss of power
)

var (
	artifactName    = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)
	imageDigestForm = regexp.MustCompile(`^(sparse-)?sha256:[0-9a-f]{64}$`) // as the image store writes it
	digestForm      = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

// clone returns a copy that shares nothing with m.
func (m Manifest) clone() Manifest {
	m.Artifacts = append([]Artifact(nil), m.Artifacts...)
	m.Recipe.Exec = append([]string(nil), m.Recipe.Exec...)
	m.Recipe.AllowHosts = append([]string(nil), m.Recipe.AllowHosts...)
	if m.Recipe.Start != nil {
		start := *m.Recipe.Start
		start.Env = maps.Clone(start.Env)
		m.Recipe.Start = &start
	}
	m.Agent.WarmLanguages = append([]string(nil), m.Agent.WarmLanguages...)
	if m.Labels != nil {
		labels := make(map[string]string, len(m.Labels))
		for k, v := range m.Labels {
			labels[k] = v
		}
		m.Labels = labels
	}
	return m
}

// check tells what is wrong with a complete manifest, in words without class.
func (m Manifest) check() error {
	for _, step := range []func() error{m.checkIDs, m.checkSizes, m.checkArtifacts, m.checkTexts} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func isSnapshotID(id string) bool {
	kind := ident.KindOf(id)
	return kind == ident.Snapshot || kind == ident.Checkpoint
}

func checkID(id string) error {
	if !isSnapshotID(id) {
		return errdefs.New(errdefs.ErrInvalid, "%.80q is not a snapshot id", id)
	}
	return nil
}

func (m Manifest) checkIDs() error {
	switch {
	case !isSnapshotID(m.ID):
		return fmt.Errorf("id %.80q is not a snapshot id", m.ID)
	case m.ParentID != "" && !isSnapshotID(m.ParentID):
		return fmt.Errorf("parent %.80q is not a snapshot id", m.ParentID)
	case m.ParentID == m.ID:
		return fmt.Errorf("%s is its own parent", m.ID)
	case m.Image.ID != "" && ident.KindOf(m.Image.ID) != ident.Image:
		return fmt.Errorf("image %.80q is not an image id", m.Image.ID)
	case m.CreatedAt.IsZero():
		return fmt.Errorf("created_at is missing")
	case m.Compat.Engine == "":
		return fmt.Errorf("compat.engine is missing")
	}
	return nil
}

func (m Manifest) checkSizes() error {
	for name, n := range map[string]int{"cpus": m.Shape.CPUs, "memory_mib": m.Shape.MemoryMiB, "disk_mib": m.Shape.DiskMiB, "agent.protocol": m.Agent.Protocol} {
		if n < 0 || n > maxShape {
			return fmt.Errorf("%s is %d", name, n)
		}
	}
	switch {
	case m.Shape.CPUs == 0 || m.Shape.MemoryMiB == 0:
		return fmt.Errorf("a machine of %d CPUs and %d MiB", m.Shape.CPUs, m.Shape.MemoryMiB)
	case !(m.PauseMs >= 0): // also NaN
		return fmt.Errorf("pause_ms is %v", m.PauseMs)
	case m.Disk != "" && m.Disk != DiskSynced && m.Disk != DiskJournal:
		return fmt.Errorf("disk is %.80q, neither synced nor journal", m.Disk)
	}
	return nil
}

func checkArtifactName(name string) error {
	if !artifactName.MatchString(name) || name == ManifestName {
		return fmt.Errorf("artifact name %.140q is not a plain file name", name)
	}
	return nil
}

// checkArtifactNames checks what must hold before any file is touched.
func (m Manifest) checkArtifactNames() error {
	if len(m.Artifacts) == 0 || len(m.Artifacts) > maxArtifacts {
		return fmt.Errorf("%d artifacts, not 1 to %d", len(m.Artifacts), maxArtifacts)
	}
	seen := map[string]bool{}
	for _, a := range m.Artifacts {
		if err := checkArtifactName(a.Name); err != nil {
			return err
		}
		if seen[a.Name] {
			return fmt.Errorf("artifact %s is listed twice", a.Name)
		}
		seen[a.Name] = true
	}
	return nil
}

func (m Manifest) checkArtifacts() error {
	if err := m.checkArtifactNames(); err != nil {
		return err
	}
	for _, a := range m.Artifacts {
		switch {
		case a.Kind != "memory" && a.Kind != "disk" && a.Kind != "device":
			return fmt.Errorf("artifact %s has kind %.40q", a.Name, a.Kind)
		case a.Format == "":
			return fmt.Errorf("artifact %s has no format", a.Name)
		case a.Size < 0 || a.Bytes < 0:
			return fmt.Errorf("artifact %s has %d bytes, %d on disk", a.Name, a.Size, a.Bytes)
		case !digestForm.MatchString(a.Digest):
			return fmt.Errorf("artifact %s has digest %.80q", a.Name, a.Digest)
		}
		if err := checkWord("format of "+a.Name, a.Format); err != nil {
			return err
		}
	}
	return nil
}

func (m Manifest) checkTexts() error {
	if len(m.Labels) > maxLabels || len(m.Agent.WarmLanguages) > maxLanguages || len(m.Recipe.Exec) > maxExec {
		return fmt.Errorf("%d labels, %d languages, %d commands: more than %d, %d, %d", len(m.Labels), len(m.Agent.WarmLanguages),
			len(m.Recipe.Exec), maxLabels, maxLanguages, maxExec)
	}
	for k, v := range m.Labels {
		if err := ident.CheckLabel(k, v); err != nil {
			return errors.New(err.Error()) // the caller gives the class
		}
		if !utf8.ValidString(v) {
			return fmt.Errorf("label %s is not UTF-8", k)
		}
	}
	if d := m.Image.Digest; d != "" && !imageDigestForm.MatchString(d) {
		return fmt.Errorf("image.digest is %.80q", d)
	}
	words := append([]string{m.Image.Name, string(m.Isolation), m.Recipe.Image, m.Recipe.From, m.Compat.Engine, m.Compat.EngineBuild,
		m.Compat.Accelerator, m.Compat.KernelDigest, m.Compat.CPU}, m.Agent.WarmLanguages...)
	for _, w := range words {
		if err := checkWord("a text", w); err != nil {
			return err
		}
	}
	if d := m.Recipe.Files; d != "" && !digestForm.MatchString(d) {
		return fmt.Errorf("recipe.files is %.80q", d)
	}
	for _, text := range m.Recipe.texts() {
		if !utf8.ValidString(text) { // JSON would change it silently
			return fmt.Errorf("the recipe is not UTF-8")
		}
	}
	return nil
}

// texts lists the texts of any length.
func (r Recipe) texts() []string {
	out := append([]string{r.Warm}, r.Exec...)
	out = append(out, r.AllowHosts...)
	if s := r.Start; s != nil {
		out = append(out, s.Command, s.Ready, s.ReadyLog, s.Cwd, s.User)
		for k, v := range s.Env {
			out = append(out, k, v)
		}
	}
	return out
}

// checkWord allows short printable texts. CPU models may be long.
func checkWord(what, s string) error {
	if len(s) > 8*maxWord || !utf8.ValidString(s) {
		return fmt.Errorf("%s has %d bytes or is not UTF-8: %.80q", what, len(s), s)
	}
	return nil
}
