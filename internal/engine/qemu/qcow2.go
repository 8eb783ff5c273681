package qemu

import (
	"encoding/binary"
	"fmt"
	"os"
)

// Layout of the empty qcow2 files that become machines' overlays. The format is
// described in QEMU's docs/interop/qcow2.txt (version 3). Four clusters: header,
// refcount table, refcount block, L1 table; everything else is unallocated, so
// reads go to the backing file, which is given on the command line and not in
// the file.
const (
	qcowClusterBits = 16
	qcowCluster     = 1 << qcowClusterBits
	qcowMagic       = 0x514649fb // "QFI\xfb"
	qcowHeaderBytes = 104
	// One L2 table of one cluster maps 8192 clusters.
	qcowBytesPerL1Entry = qcowCluster / 8 * qcowCluster
)

// createOverlay writes an empty qcow2 file of the given virtual size at path.
func createOverlay(path string, size int64) error {
	l1Entries := (size + qcowBytesPerL1Entry - 1) / qcowBytesPerL1Entry
	if size <= 0 || l1Entries*8 > qcowCluster {
		return fmt.Errorf("create overlay %s: size %d is out of range", path, size)
	}
	be := binary.BigEndian
	buf := make([]byte, 3*qcowCluster)
	be.PutUint32(buf[0:], qcowMagic)
	be.PutUint32(buf[4:], 3) // version
	be.PutUint32(buf[20:], qcowClusterBits)
	be.PutUint64(buf[24:], uint64(size))
	be.PutUint32(buf[36:], uint32(l1Entries))
	be.PutUint64(buf[40:], 3*qcowCluster) // L1 table
	be.PutUint64(buf[48:], 1*qcowCluster) // refcount table
	be.PutUint32(buf[56:], 1)             // of one cluster
	be.PutUint32(buf[96:], 4)             // refcounts of 16 bits
	be.PutUint32(buf[100:], qcowHeaderBytes)
	be.PutUint64(buf[qcowCluster:], 2*qcowCluster) // the only refcount block
	for i := range 4 {
		be.PutUint16(buf[2*qcowCluster+2*i:], 1)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("create overlay: %w", err)
	}
	defer f.Close()
	if err := writeSparse(f, buf); err != nil {
		return fmt.Errorf("create overlay %s: %w", path, err)
	}
	if err := f.Truncate(4 * qcowCluster); err != nil {
		return fmt.Errorf("create overlay %s: %w", path, err)
	}
	return nil
}

// writeSparse writes only the 4 KiB blocks of buf that hold something.
func writeSparse(f *os.File, buf []byte) error {
	for off := 0; off < len(buf); off += 4096 {
		block := buf[off : off+4096]
		if isZero(block) {
			continue
		}
		if _, err := f.WriteAt(block, int64(off)); err != nil {
			return err
		}
	}
	return nil
}

func isZero(b []byte) bool {
	for len(b) >= 8 {
		if binary.LittleEndian.Uint64(b) != 0 {
			return false
		}
		b = b[8:]
	}
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}
