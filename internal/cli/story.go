package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// demoStory is the part of the demo in which a running program is branched into
// children with different hints and one of them is rolled back.
type demoStory struct {
	Source   string           `json:"source"`
	Snapshot string           `json:"snapshot"` // behind the branch
	Count    int              `json:"count"`    // of the program when it was branched
	Children []demoChild      `json:"children"`
	Rollback demoRollback     `json:"rollback"`
	Tree     []forkd.TreeNode `json:"tree"`
}

// demoChild is a child of the running program.
type demoChild struct {
	ID    string `json:"id"`
	Hint  string `json:"hint"`
	Count int    `json:"count"` // it went on from the source's
}

// demoRollback is what became of one child.
type demoRollback struct {
	ID         string `json:"id"`
	Checkpoint string `json:"checkpoint"`
	Before     int    `json:"before"`
	Broken     int    `json:"broken"`
	After      int    `json:"after"`
}

// demoHints are what the children are told to try.
var demoHints = [...]string{"depth first", "breadth first", "best first"}

const (
	storyStart = `
import json, os, threading, time
_forkd_count = 0
def _forkd_work():
    global _forkd_count
    while True:
        _forkd_count += 1
        time.sleep(0.002)
threading.Thread(target=_forkd_work, daemon=True).start()
`
	storyLook  = "print(json.dumps({'count': _forkd_count, 'hint': os.environ.get('HINT', '')}))"
	storyBreak = "_forkd_count = -1000000; os.system('rm -rf /root /home')\n" + storyLook
)

// demoBranch branches a counting program, rolls a child back, and reads the tree. What
// it makes is in made, also if it fails.
func (a *app) demoBranch(ctx context.Context, c *forkd.Client, r *demoReport, made *[]string) error {
	p := a.progress()
	defer p.done()
	p.step("branching a running program", -1)
	story := &demoStory{Source: r.Forks[0].ID}
	r.Story = story
	if _, err := storyEval(ctx, c, story.Source, storyStart+storyLook); err != nil {
		return err
	}
	at, err := storyEval(ctx, c, story.Source, storyLook)
	if err != nil {
		return err
	}
	story.Count = at.Count
	start := time.Now()
	req := forkd.ForkRequest{SnapshotTag: story.Source}
	for _, hint := range demoHints {
		req.Children = append(req.Children, forkd.ChildInput{Env: map[string]string{"HINT": hint}, Labels: map[string]string{"hint": hint}})
	}
	res, err := c.Fork(ctx, req, nil)
	*made = append(*made, ids(res.Sandboxes)...)
	if err != nil {
		return err
	}
	for i, sb := range res.Sandboxes {
		story.Snapshot = sb.SnapshotID
		child, err := storyEval(ctx, c, sb.ID, storyLook)
		if err != nil {
			return err
		}
		if child.Hint != demoHints[i] || child.Count < at.Count {
			return errdefs.New(errdefs.ErrInternal, "child %s goes on at %d with hint %q, instead of from %d with %q", sb.ID, child.Count, child.Hint, at.Count, demoHints[i])
		}
		child.ID = sb.ID
		story.Children = append(story.Children, child)
	}
	r.step("branch", start, fmt.Sprintf("a program that had counted to %d goes on in %d children, each with its own hint", at.Count, len(story.Children)))
	if err := a.demoRollback(ctx, c, r); err != nil {
		return err
	}
	story.Tree, err = c.Tree(ctx, story.Snapshot)
	return err
}

// demoRollback breaks a child and takes it back.
func (a *app) demoRollback(ctx context.Context, c *forkd.Client, r *demoReport) error {
	if len(r.Story.Children) == 0 {
		return errors.New("the daemon answered without children")
	}
	back := &r.Story.Rollback
	back.ID = r.Story.Children[0].ID
	point, err := c.Checkpoint(ctx, back.ID, forkd.CheckpointRequest{Label: "before the mistake"})
	if err != nil {
		return err
	}
	back.Checkpoint = point.ID
	broken, err := storyEval(ctx, c, back.ID, storyBreak)
	if err != nil {
		return err
	}
	start := time.Now()
	res, err := c.Rollback(ctx, back.ID, point.ID)
	if err != nil {
		return err
	}
	after, err := storyEval(ctx, c, back.ID, storyLook)
	if err != nil {
		return err
	}
	back.Before, back.Broken, back.After = r.Story.Children[0].Count, broken.Count, after.Count
	if after.Count < back.Before {
		return errdefs.New(errdefs.ErrInternal, "after the rollback child %s is at %d, not at %d or later", back.ID, after.Count, back.Before)
	}
	r.step("rollback", start, fmt.Sprintf("from %d back to %d, memory and disk, in %s", broken.Count, after.Count, millis(res.DurationMS)))
	return nil
}

// storyEval runs code that prints where the program is.
func storyEval(ctx context.Context, c *forkd.Client, id, code string) (demoChild, error) {
	var out demoChild
	res, err := c.Eval(ctx, id, forkd.EvalRequest{Code: code})
	switch {
	case err != nil:
		return out, err
	case res.Error != nil:
		return out, errdefs.New(errdefs.ErrGuest, "the counting program in %s failed: %s", id, *res.Error)
	}
	if err := json.Unmarshal(res.StdoutBytes(), &out); err != nil {
		return out, errdefs.New(errdefs.ErrGuest, "the counting program in %s printed %.200q: %w", id, res.Stdout, err)
	}
	return out, nil
}

func (a *app) printStory(s *demoStory) error {
	if s == nil {
		return nil
	}
	fmt.Fprintln(a.env.Stdout)
	rows := [][]string{}
	for i, line := range drawTree(s.Tree) {
		n := s.Tree[i]
		note := ""
		switch {
		case n.ID == s.Source:
			note = "counting"
		case n.ID == s.Rollback.ID:
			note = "rolled back; hint: " + n.Labels["hint"]
		case n.Labels["hint"] != "":
			note = "hint: " + n.Labels["hint"]
		}
		rows = append(rows, []string{line, n.Kind, note})
	}
	return a.table([]string{"TREE", "KIND", ""}, rows)
}
