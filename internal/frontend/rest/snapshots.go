package rest

import (
	"math"
	"net/http"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/sandbox"
)

func (s *server) createSnapshot(w http.ResponseWriter, r *http.Request) error {
	var req api.CreateSnapshot
	files, err := decodeWithFiles(w, r, &req)
	if err != nil {
		return err
	}
	c, err := createOf(req)
	if err != nil {
		return err
	}
	c.Files = files
	if !wantsStream(r) {
		sn, err := s.svc.CreateSnapshot(r.Context(), c, nil)
		if err != nil {
			return err
		}
		respond(w, http.StatusCreated, snapshotOf(sn))
		return nil
	}
	out := &stream{w: w}
	sn, err := s.svc.CreateSnapshot(r.Context(), c, func(step string, fraction float64) {
		out.line(api.SnapshotLine{Progress: &api.Progress{Step: step, Fraction: fraction}})
	})
	last := api.SnapshotLine{Done: true}
	switch {
	case err != nil && !out.started():
		return err
	case err != nil:
		b := body(err)
		last.Error, last.Code, last.Hint = b.Error, b.Code, b.Hint
		forget(w)
	default:
		info := snapshotOf(sn)
		last.Snapshot = &info
	}
	out.line(last)
	return nil
}

// createOf checks a request and turns it into what the service is asked.
func createOf(req api.CreateSnapshot) (sandbox.CreateSnapshot, error) {
	var zero sandbox.CreateSnapshot
	switch {
	case req.Kernel != "" || req.Rootfs != "" || req.Tap != "":
		return zero, unsupported("kernel, rootfs and tap", "build an image (POST /v1/images) and name it in the field image")
	case req.Tag == "":
		return zero, missing("tag")
	case req.Image != "" && req.From != "":
		return zero, errdefs.New(errdefs.ErrInvalid, "image and from are both given: a snapshot starts from one of them")
	case req.CPUs < 0 || req.MemoryMiB < 0 || req.DiskMiB < 0:
		return zero, errdefs.New(errdefs.ErrInvalid, "cpus, memory_mib and disk_mib must not be negative")
	case math.IsNaN(req.ExecTimeout) || req.ExecTimeout < 0 || req.ExecTimeout > agentwire.MaxExecTimeout.Seconds():
		return zero, errdefs.New(errdefs.ErrInvalid, "exec_timeout_secs is %g, want 0 to %g", req.ExecTimeout, agentwire.MaxExecTimeout.Seconds())
	}
	err := ident.CheckTag(req.Tag)
	if err != nil {
		return zero, err
	}
	for _, ref := range []string{req.Image, req.From} {
		if ref == "" {
			continue
		}
		if err := ident.CheckRef(ref); err != nil {
			return zero, err
		}
	}
	c := sandbox.CreateSnapshot{
		Tag: req.Tag, Replace: req.Replace, Image: req.Image, From: req.From, Warm: req.Warm, Exec: req.Exec,
		Labels: req.Labels, ExecTimeout: time.Duration(req.ExecTimeout * float64(time.Second)), AllowHosts: req.AllowHosts, WithSecrets: req.WithSecrets,
	}
	if c.Start, err = startOf(req.Start); err != nil {
		return zero, err
	}
	c.Shape.CPUs, c.Shape.MemoryMiB, c.Shape.DiskMiB = req.CPUs, req.MemoryMiB, req.DiskMiB
	return c, nil
}

func (s *server) listSnapshots(w http.ResponseWriter, r *http.Request) error {
	list, err := s.svc.Snapshots(r.Context())
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, convert(list, snapshotOf))
	return nil
}

func (s *server) getSnapshot(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	sn, err := s.svc.Snapshot(r.Context(), ref)
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, snapshotOf(sn))
	return nil
}

func (s *server) getSnapshotInfo(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	sn, err := s.svc.Snapshot(r.Context(), ref)
	if err != nil {
		return err
	}
	all, err := s.svc.Snapshots(r.Context())
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, detailOf(sn, all))
	return nil
}

func (s *server) deleteSnapshot(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	var d sandbox.Delete
	if d.Cascade, err = flag(r, "cascade"); err != nil {
		return err
	}
	if d.Force, err = flag(r, "force"); err != nil {
		return err
	}
	if d.Cascade && d.Force {
		return errdefs.New(errdefs.ErrInvalid, "cascade and force exclude each other")
	}
	if err := s.svc.DeleteSnapshot(r.Context(), ref, d); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *server) putTag(w http.ResponseWriter, r *http.Request) error {
	tag := r.PathValue("ref")
	if err := ident.CheckTag(tag); err != nil {
		return err
	}
	var req api.SetTag
	if err := decode(r, &req); err != nil {
		return err
	}
	if req.Snapshot == "" {
		return missing("snapshot")
	}
	if err := ident.CheckRef(req.Snapshot); err != nil {
		return err
	}
	if err := s.svc.GiveTag(r.Context(), req.Snapshot, tag, sandbox.Tagging{Replace: req.Replace, WithSecrets: req.WithSecrets}); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *server) deleteTag(w http.ResponseWriter, r *http.Request) error {
	tag := r.PathValue("ref")
	if err := ident.CheckTag(tag); err != nil {
		return err
	}
	if err := s.svc.Untag(r.Context(), tag); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// snapshotName is how upstream's fields name a snapshot.
func snapshotName(sn sandbox.Snapshot) string {
	if len(sn.Tags) > 0 {
		return sn.Tags[0]
	}
	return sn.ID
}

func snapshotOf(sn sandbox.Snapshot) api.Snapshot {
	out := api.Snapshot{
		Tag: snapshotName(sn), Dir: sn.Dir, CreatedAtUnix: sn.CreatedAt.Unix(), Warning: sn.Reason,
		Status: string(sn.Status), Bootable: sn.Status == sandbox.SnapshotReady,
		ID: sn.ID, Tags: orNone(sn.Tags), ParentID: sn.ParentID, ImageID: sn.ImageID, Image: sn.ImageName,
		Engine: sn.Engine, Isolation: string(sn.Isolation),
		CPUs: sn.Shape.CPUs, MemoryMiB: sn.Shape.MemoryMiB, DiskMiB: sn.Shape.DiskMiB, Labels: orEmpty(sn.Labels),
		Recipe:      recipeOf(sn.Recipe),
		MemoryBytes: sn.MemoryBytes, DiskBytes: sn.DiskBytes, HoldsSecrets: sn.HoldsSecrets,
		Protocol: sn.AgentProtocol, ChainDepth: sn.Depth, Sandboxes: sn.Sandboxes, ForkMemory: sn.ForkMemory,
	}
	if sn.Pause > 0 {
		pause := ms(sn.Pause)
		out.PauseMS = &pause
	}
	out.BranchedFrom, out.Disk = sn.BranchedFrom, string(sn.Disk)
	if !sn.ExpiresAt.IsZero() {
		at := sn.ExpiresAt.Unix()
		out.ExpiresUnix = &at
	}
	return out
}

// ownBytes is the disk space of what a snapshot adds to its parent.
func ownBytes(sn sandbox.Snapshot) int64 { return sn.MemoryBytes + sn.DiskBytes + sn.DeviceBytes }

// detailOf places sn in the tree of all snapshots.
func detailOf(sn sandbox.Snapshot, all []sandbox.Snapshot) api.SnapshotDetail {
	out := api.SnapshotDetail{
		Snapshot: snapshotOf(sn), MemoryLogicalBytes: int64(sn.Shape.MemoryMiB) << 20,
		MemoryPhysicalBytes: sn.MemoryBytes, VMStateBytes: sn.DeviceBytes, Dependents: []string{}, Ancestors: []string{},
		DiskLogicalBytes: int64(sn.Shape.DiskMiB) << 20, ChainBytes: ownBytes(sn), UsedBy: orNone(sn.UsedBy),
	}
	byID := map[string]sandbox.Snapshot{}
	for _, other := range all {
		byID[other.ID] = other
		if other.ParentID == sn.ID {
			out.Dependents = append(out.Dependents, snapshotName(other))
		}
	}
	// Each step is taken out of the map, so a damaged, cyclic tree ends too.
	for id := sn.ParentID; id != ""; {
		parent, ok := byID[id]
		if !ok {
			break
		}
		delete(byID, id)
		out.Ancestors = append([]string{snapshotName(parent)}, out.Ancestors...)
		out.ChainBytes += ownBytes(parent)
		id = parent.ParentID
	}
	if n := len(out.Ancestors); n > 0 {
		out.ParentTag = out.Ancestors[n-1]
	}
	return out
}
