package bench

// Pool is what the forks are to be claimed from.
type Pool string

// The pools of a measurement.
const (
	PoolNone  Pool = "none"  // nothing is prepared
	PoolBlank Pool = "blank" // restored, never run
	PoolWarm  Pool = "warm"  // the whole way to the first answer rehearsed
)

// ForkReport is the result of measuring forks. The names in JSON stay; figures are
// medians over the runs, and null where they could not be measured.
type ForkReport struct {
	Engine         string    `json:"engine"`
	N              int       `json:"n"`
	Answered       int       `json:"answered"` // right answers, of the worst run
	Pool           Pool      `json:"pool"`
	PoolPrepareMS  float64   `json:"pool_prepare_ms"`
	TotalMS        float64   `json:"total_ms"` // request sent to the last answer
	P50MS          float64   `json:"p50_ms"`   // request sent to the answer of one child
	P90MS          float64   `json:"p90_ms"`
	P99MS          float64   `json:"p99_ms"`
	MaxMS          float64   `json:"max_ms"`
	PSSKiBPerChild float64   `json:"pss_kib_per_child"` // after the first eval
	CPUSPerFork    *float64  `json:"cpu_s_per_fork"`    // daemon, machines and client, without the pool's preparation
	Baselines      Baselines `json:"baselines"`
	Machine        Machine   `json:"machine"`

	Isolation              string         `json:"isolation"`
	Snapshot               string         `json:"snapshot"`
	MemoryMiB              int            `json:"memory_mib"`
	Claimed                map[string]int `json:"claimed"` // children by the pool they came from, over all runs
	PoolPrepareCPUSPerFork *float64       `json:"pool_prepare_cpu_s_per_fork"`
	Ratios                 Ratios         `json:"ratios"`
	Command                string         `json:"command"`
	Runs                   []ForkRun      `json:"runs"`

	// children are the times of the median run, for its chart.
	children []float64
}

// Baselines is what else was measured in the same call.
type Baselines struct {
	Process  Baseline `json:"process"`
	Runc     Baseline `json:"runc"`
	ColdBoot ColdBoot `json:"cold_boot"`
}

// Baseline is N of something else doing the same work.
type Baseline struct {
	TotalMS  *float64 `json:"total_ms"`
	CPUSEach *float64 `json:"cpu_s_each"`
	How      string   `json:"how,omitempty"`
	Skipped  string   `json:"skipped,omitempty"` // why there is no figure
}

// ColdBoot is one boot of the same machine from its image.
type ColdBoot struct {
	MS      *float64 `json:"ms"`
	How     string   `json:"how,omitempty"`
	Skipped string   `json:"skipped,omitempty"`
}

// Ratios are totals divided by those of the forks: above 1 the forks are faster.
type Ratios struct {
	Process  *float64 `json:"process"`
	Runc     *float64 `json:"runc"`
	ColdBoot *float64 `json:"cold_boots"` // N boots one after the other
}

// ForkRun is one run of a report.
type ForkRun struct {
	Answered               int      `json:"answered"`
	PoolPrepareMS          float64  `json:"pool_prepare_ms"`
	TotalMS                float64  `json:"total_ms"`
	P50MS                  float64  `json:"p50_ms"`
	P90MS                  float64  `json:"p90_ms"`
	P99MS                  float64  `json:"p99_ms"`
	MaxMS                  float64  `json:"max_ms"`
	PSSKiBPerChild         float64  `json:"pss_kib_per_child"`
	CPUSPerFork            *float64 `json:"cpu_s_per_fork"`
	PoolPrepareCPUSPerFork *float64 `json:"pool_prepare_cpu_s_per_fork"`
	ProcessTotalMS         *float64 `json:"process_total_ms"`
	RuncTotalMS            *float64 `json:"runc_total_ms"`
	Failures               []string `json:"failures,omitempty"` // the first few

	processCPU, runcCPU *float64
	claimed             map[string]int
	children            []float64 // time of each answer in ms, in order of arrival
}

// newForkReport joins the runs of one n.
func newForkReport(n int, s *subject, o ForkOptions, runs []ForkRun) ForkReport {
	med := func(value func(ForkRun) float64) float64 {
		return *medianOf(runs, func(r ForkRun) *float64 { return ptr(value(r)) })
	}
	r := ForkReport{
		Engine: s.engine, Isolation: s.isolation, N: n, Answered: n, Pool: o.Pool, Snapshot: s.name, MemoryMiB: s.memoryMiB,
		PoolPrepareMS:  med(func(r ForkRun) float64 { return r.PoolPrepareMS }),
		TotalMS:        med(func(r ForkRun) float64 { return r.TotalMS }),
		P50MS:          med(func(r ForkRun) float64 { return r.P50MS }),
		P90MS:          med(func(r ForkRun) float64 { return r.P90MS }),
		P99MS:          med(func(r ForkRun) float64 { return r.P99MS }),
		MaxMS:          med(func(r ForkRun) float64 { return r.MaxMS }),
		PSSKiBPerChild: med(func(r ForkRun) float64 { return r.PSSKiBPerChild }),
		CPUSPerFork:    medianOf(runs, func(r ForkRun) *float64 { return r.CPUSPerFork }),
		Claimed:        map[string]int{},
		Runs:           runs,
	}
	r.PoolPrepareCPUSPerFork = medianOf(runs, func(r ForkRun) *float64 { return r.PoolPrepareCPUSPerFork })
	r.Baselines.Process.TotalMS = medianOf(runs, func(r ForkRun) *float64 { return r.ProcessTotalMS })
	r.Baselines.Process.CPUSEach = medianOf(runs, func(r ForkRun) *float64 { return r.processCPU })
	r.Baselines.Runc.TotalMS = medianOf(runs, func(r ForkRun) *float64 { return r.RuncTotalMS })
	r.Baselines.Runc.CPUSEach = medianOf(runs, func(r ForkRun) *float64 { return r.runcCPU })
	var totals []float64
	for _, run := range runs {
		r.Answered = min(r.Answered, run.Answered)
		totals = append(totals, run.TotalMS)
		for pool, count := range run.claimed {
			r.Claimed[pool] += count
		}
	}
	r.children = runs[medianIndex(totals)].children
	return r
}

// ratios fills the ratios from what was measured.
func (r *ForkReport) ratios() {
	over := func(ms *float64, times float64) *float64 {
		if ms == nil || r.TotalMS == 0 || r.Answered < r.N {
			return nil
		}
		return ptr(round(*ms*times/r.TotalMS, 2))
	}
	r.Ratios = Ratios{
		Process: over(r.Baselines.Process.TotalMS, 1), Runc: over(r.Baselines.Runc.TotalMS, 1),
		ColdBoot: over(r.Baselines.ColdBoot.MS, float64(r.N)),
	}
}
