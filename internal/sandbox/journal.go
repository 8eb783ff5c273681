package sandbox

import (
	"context"
	"encoding/json"
	"fmt"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/store/metadata"
)

// journal writes the row of one sandbox.
func (s *Service) journal(ctx context.Context, info Sandbox) error {
	row, err := s.toRow(info)
	if err != nil {
		return err
	}
	return s.cfg.Journal.UpdateSandbox(ctx, row)
}

func (s *Service) toRow(info Sandbox) (metadata.Sandbox, error) {
	row := metadata.Sandbox{
		ID: info.ID, Name: info.Name, State: string(info.State), Reason: info.Reason,
		SnapshotID: info.SnapshotID, SnapshotTag: info.SnapshotTag,
		Engine: info.Engine, Isolation: info.Isolation, Shape: info.Shape, Labels: info.Labels,
		CreatedAt: info.CreatedAt, EndedAt: info.EndedAt, MemoryLimitMiB: info.MemoryLimitMiB,
		CPULimitPercent: info.CPULimitPercent, PIDsLimit: info.PIDsLimit,
		BranchCount: info.BranchCount, Batch: info.Labels[labelBatch], Session: s.cfg.Session,
		HoldsSecrets: info.HoldsSecrets, VerdictOwed: info.owed,
		MachineID: info.machineID, RestoredID: info.restoredID,
	}
	if info.State == Capturing || info.State == RollingBack {
		row.State = string(Running) // as which a restarted daemon takes it over
	}
	var err error
	if info.Receipt != nil {
		if row.Receipt, err = json.Marshal(info.Receipt); err != nil {
			return row, fmt.Errorf("encode receipt of %s: %w", info.ID, err)
		}
	}
	if row.Timing, err = json.Marshal(info.Timing); err != nil {
		return row, fmt.Errorf("encode timing of %s: %w", info.ID, err)
	}
	if info.Auto != (AutoCheckpoint{}) {
		if row.Schedule, err = json.Marshal(info.Auto); err != nil {
			return row, fmt.Errorf("encode schedule of %s: %w", info.ID, err)
		}
	}
	return row, nil
}

// fromRow is the inverse of toRow. A receipt, timing or schedule that cannot be read
// is left out: no sandbox must be lost because of one.
func fromRow(row metadata.Sandbox) Sandbox {
	info := Sandbox{
		ID: row.ID, Name: row.Name, State: State(row.State), Reason: row.Reason,
		SnapshotID: row.SnapshotID, SnapshotTag: row.SnapshotTag,
		Engine: row.Engine, Isolation: row.Isolation, Shape: row.Shape, Labels: row.Labels,
		CreatedAt: row.CreatedAt, EndedAt: row.EndedAt, MemoryLimitMiB: row.MemoryLimitMiB,
		CPULimitPercent: row.CPULimitPercent, PIDsLimit: row.PIDsLimit,
		BranchCount: row.BranchCount, HoldsSecrets: row.HoldsSecrets, owed: row.VerdictOwed,
		machineID: row.MachineID, restoredID: row.RestoredID,
	}
	var receipt agentwire.Receipt
	if len(row.Receipt) > 0 && json.Unmarshal(row.Receipt, &receipt) == nil {
		info.Receipt = &receipt
	}
	_ = json.Unmarshal(row.Timing, &info.Timing)
	if len(row.Schedule) > 0 {
		var auto AutoCheckpoint
		if json.Unmarshal(row.Schedule, &auto) == nil && auto.check() == nil {
			info.Auto = auto
		}
	}
	return info
}
