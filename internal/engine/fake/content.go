package fake

import (
	"encoding/binary"
	"fmt"
	"maps"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/layerfmt"
)

// content is everything a capture stores.
type content struct {
	Memory map[string]cell
	Disk   map[string]string
	Device device
}

// cell is a value in memory; it fills one page.
type cell struct {
	Page  uint64
	Value string
}

// device is the state of a guest that is neither memory nor disk.
type device struct {
	Booted    bool              `json:"booted"`
	Frozen    bool              `json:"frozen"`
	Committed bool              `json:"committed"` // waits for a verdict
	NextPage  uint64            `json:"next_page"`
	Runners   []string          `json:"runners,omitempty"`
	Hostname  string            `json:"hostname"`
	SandboxID string            `json:"sandbox_id"`
	Gen       uint64            `json:"generation"`
	Env       map[string]string `json:"env,omitempty"`
	Secrets   map[string]string `json:"secrets,omitempty"`
	Seed      string            `json:"seed,omitempty"` // how its generators were last reseeded
	BootedAt  time.Time         `json:"booted_at"`
	Clock     time.Time         `json:"clock"` // wall clock of the guest at the capture
	// offset is the guest's wall clock minus the host's.
	offset time.Duration
}

func newContent(now time.Time) content {
	return content{Memory: map[string]cell{}, Disk: map[string]string{}, Device: device{NextPage: 1, BootedAt: now}}
}

func (c content) clone() content {
	c.Memory, c.Disk = maps.Clone(c.Memory), maps.Clone(c.Disk)
	c.Device.Runners = append([]string(nil), c.Device.Runners...)
	c.Device.Env, c.Device.Secrets = maps.Clone(c.Device.Env), maps.Clone(c.Device.Secrets)
	return c
}

// maxCell bounds key and value together: they share a page with two lengths.
const maxCell = layerfmt.DefaultUnitSize - 4

// set stores a value in memory.
func (c *content) set(k, value string, pages uint64) error {
	if len(k)+len(value) > maxCell || k == "" {
		return errdefs.New(errdefs.ErrInvalid, "a value of %d bytes does not fit a page", len(value))
	}
	page := c.Memory[k].Page
	if page == 0 {
		if c.Device.NextPage >= pages {
			return errdefs.New(errdefs.ErrResourceExhausted, "all %d pages of the guest are in use", pages)
		}
		page = c.Device.NextPage
		c.Device.NextPage++
	}
	c.Memory[k] = cell{Page: page, Value: value}
	return nil
}

func encodeCell(k, value string) []byte {
	b := make([]byte, layerfmt.DefaultUnitSize)
	binary.LittleEndian.PutUint16(b, uint16(len(k)))
	binary.LittleEndian.PutUint16(b[2:], uint16(len(value)))
	copy(b[4:], k+value)
	return b
}

func decodeCell(b []byte) (k, value string, err error) {
	nk, nv := int(binary.LittleEndian.Uint16(b)), int(binary.LittleEndian.Uint16(b[2:]))
	if nk == 0 || nk+nv > maxCell {
		return "", "", fmt.Errorf("memory page with a key of %d and a value of %d bytes: %w", nk, nv, errdefs.ErrCorrupt)
	}
	return string(b[4 : 4+nk]), string(b[4+nk : 4+nk+nv]), nil
}
