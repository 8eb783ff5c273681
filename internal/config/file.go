package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"

	"github.com/BurntSushi/toml"

	"forkd.dev/forkd/internal/errdefs"
)

// maxFileBytes bounds a configuration: a table of a dozen lines.
const maxFileBytes = 1 << 20

// readFile takes the settings of one file.
func (c *Config) readFile(path string) error {
	if path == "" {
		return nil
	}
	f, err := os.Open(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, fs.ErrPermission):
		c.Skipped = append(c.Skipped, path)
		return nil
	case err != nil:
		return errdefs.As(errdefs.ErrInvalid, fmt.Errorf("read configuration: %w", err))
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return errdefs.As(errdefs.ErrInvalid, fmt.Errorf("read configuration: %w", err))
	}
	if len(b) > maxFileBytes {
		return errdefs.New(errdefs.ErrInvalid, "configuration %s has more than %d bytes", path, maxFileBytes)
	}
	info, err := f.Stat()
	if err != nil {
		return errdefs.As(errdefs.ErrInvalid, fmt.Errorf("read configuration: %w", err))
	}
	return c.parse(path, b, info.Mode())
}

// parse takes the settings of a file's content.
func (c *Config) parse(path string, b []byte, mode fs.FileMode) error {
	found := map[string]any{}
	if _, err := toml.Decode(string(b), &found); err != nil {
		var syntax toml.ParseError
		if errors.As(err, &syntax) {
			return errdefs.New(errdefs.ErrInvalid, "configuration %s, line %d: %s", path, syntax.Position.Line, syntax.Message)
		}
		return errdefs.New(errdefs.ErrInvalid, "configuration %s: %w", path, err)
	}
	for _, key := range slices.Sorted(maps.Keys(found)) {
		v, known := c.values[key]
		if !known {
			return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "configuration %s: there is no setting %.80q", path, key),
				"forkd config show, without that line, lists all settings")
		}
		if v.Secret && mode.Perm()&0o077 != 0 {
			return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "configuration %s: it holds %s, and others may read it (mode %04o)", path, key, mode.Perm()),
				"chmod 600 %s", path)
		}
		texts, err := textsOf(v.Setting, found[key])
		if err != nil {
			return errdefs.New(errdefs.ErrInvalid, "configuration %s: %s: %w", path, key, err)
		}
		if err := c.set(v.Setting, texts, path); err != nil {
			return err
		}
	}
	return nil
}

// textsOf turns a value of a file into the form that flags have.
func textsOf(s Setting, value any) ([]string, error) {
	switch v := value.(type) {
	case string:
		return []string{v}, nil
	case int64:
		return []string{strconv.FormatInt(v, 10)}, nil
	case []any:
		if s.Kind != List {
			return nil, errors.New("it has one value, not a list")
		}
		out := make([]string, 0, len(v))
		for _, item := range v {
			text, ok := item.(string)
			if !ok {
				return nil, fmt.Errorf("%v in the list is no text: write it in quotes", item)
			}
			out = append(out, text)
		}
		return out, nil
	}
	return nil, fmt.Errorf("%v is neither text nor a number", value)
}
