package cli

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// Bounds of what fork reads.
const (
	maxEachLine = 24 << 20 // a child's files, in base64
	maxEach     = 1000
	maxSecret   = 48 << 10
)

// forkInputs adds what comes from files: inputs of single children, and secrets.
func (a *app) forkInputs(f forkFlags, req *forkd.ForkRequest) error {
	var err error
	if req.Secrets, err = secretsOf(f.secrets, a.env.Getenv); err != nil || f.each == "" {
		return err
	}
	in := a.env.Stdin
	if f.each != "-" {
		file, err := os.Open(f.each)
		if err != nil {
			return errdefs.As(errdefs.ErrInvalid, fmt.Errorf("read inputs of --each: %w", err))
		}
		defer file.Close()
		in = file
	}
	if in == nil {
		return errdefs.New(errdefs.ErrInvalid, "--each - reads standard input, and there is none")
	}
	if req.Children, err = readEach(in); err != nil {
		return fmt.Errorf("read inputs of --each %s: %w", f.each, err)
	}
	if f.n == 0 {
		req.N = forkd.Int(len(req.Children))
	}
	return nil
}

// readEach reads a JSON object a line; empty lines are skipped.
func readEach(r io.Reader) ([]forkd.ChildInput, error) {
	var out []forkd.ChildInput
	scan := bufio.NewScanner(r)
	scan.Buffer(nil, maxEachLine)
	for n := 1; scan.Scan(); n++ {
		line := bytes.TrimSpace(scan.Bytes())
		if len(line) == 0 {
			continue
		}
		if len(out) == maxEach {
			return nil, errdefs.New(errdefs.ErrInvalid, "more than %d children", maxEach)
		}
		var in forkd.ChildInput
		dec := json.NewDecoder(bytes.NewReader(line))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&in); err != nil || dec.More() {
			err = errors.Join(err, trailing(dec))
			return nil, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "line %d: %w", n, err),
				`write one object a line, as {"env":{"HINT":"x"},"labels":{"try":"1"},"files":{"/work/hint":"text"}}`)
		}
		out = append(out, in)
	}
	if err := scan.Err(); err != nil {
		return nil, errdefs.As(errdefs.ErrInvalid, err)
	}
	if len(out) == 0 {
		return nil, errdefs.New(errdefs.ErrInvalid, "it has no line")
	}
	return out, nil
}

func trailing(dec *json.Decoder) error {
	if dec.More() {
		return errors.New("there is more behind the object")
	}
	return nil
}

// secretsOf reads secrets from the environment or from files, never from the command
// line, which every user of the machine can see.
func secretsOf(list []string, getenv func(string) string) (map[string]string, error) {
	if len(list) == 0 {
		return nil, nil
	}
	out := make(map[string]string, len(list))
	for _, item := range list {
		key, value, given := strings.Cut(item, "=")
		file, isFile := strings.CutPrefix(value, "@")
		switch {
		case key == "" || given && !isFile:
			return nil, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "--secret %.40q: a secret does not belong on a command line, where others can read it", key),
				"write --secret KEY to take it from the environment, or --secret KEY=@FILE")
		case given:
			text, err := readSecret(file)
			if err != nil {
				return nil, err
			}
			out[key] = text
		default:
			if out[key] = getenv(key); out[key] == "" {
				return nil, errdefs.New(errdefs.ErrInvalid, "--secret %s: there is no such variable in the environment", key)
			}
		}
	}
	return out, nil
}

// readSecret reads a file without the line end that editors leave.
func readSecret(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", errdefs.As(errdefs.ErrInvalid, fmt.Errorf("read secret: %w", err))
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSecret+1))
	if err != nil {
		return "", errdefs.As(errdefs.ErrInvalid, fmt.Errorf("read secret: %w", err))
	}
	if len(b) > maxSecret {
		return "", errdefs.New(errdefs.ErrInvalid, "secret in %s has more than %d bytes", name, maxSecret)
	}
	return strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r"), nil
}
