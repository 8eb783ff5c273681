package virtio

// Feature bits of transport and queues (section 6).
const (
	FeatureIndirect  = 1 << 28
	FeatureEventIdx  = 1 << 29
	FeatureVersion1  = 1 << 32
	FeatureRingReset = 1 << 40
)

// commonFeatures are offered for every device.
const commonFeatures uint64 = FeatureIndirect | FeatureEventIdx | FeatureVersion1 | FeatureRingReset

// Device ids (section 5).
const (
	TypeNet     = 1
	TypeBlock   = 2
	TypeConsole = 3
	TypeEntropy = 4
	TypeBalloon = 5
)

// Bits of the device status register (2.1).
const (
	statusAcknowledge = 1
	statusDriver      = 2
	statusDriverOK    = 4
	statusFeaturesOK  = 8
	statusNeedsReset  = 64
	statusFailed      = 128
)
