// Package config says what can be set, and finds the value of each setting: a flag
// wins over the environment, that over the user's file, that over the system's
// file, that over the default.
//
// One table ([Table]) drives flags, variables, files and `forkd config show`. A key
// that is not in it is an error, which names the file: a misspelt limit must not
// be no limit.
package config

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// Kind is the form of a value.
type Kind int

// The kinds.
const (
	Text Kind = iota
	Number
	List
)

// Scope says who reads a setting.
type Scope int

// The scopes.
const (
	Client Scope = iota // every command that talks to a daemon
	Daemon              // forkd serve
)

// Setting is one thing that can be set.
type Setting struct {
	Key     string // in files
	Flag    string // without the dashes
	Alias   string // second spelling of the flag, or ""
	Env     string
	Default string // as shown; "" is none
	Help    string
	Kind    Kind
	Scope   Scope
	Secret  bool // never shown; its file may be read by its owner only
	check   func(text string) error
}

// Origins of values that are not in a file.
const (
	FromFlag    = "flag"
	FromEnv     = "environment"
	FromDefault = "default"
)

// Value is a setting with its value. A default has no Texts: its reader knows it.
type Value struct {
	Setting
	Texts  []string
	Origin string // FromFlag, FromEnv, FromDefault, or the path of a file
}

// Config holds the value of each setting. It does not change.
type Config struct {
	values map[string]Value
	// Skipped lists files that exist but may not be read by this user.
	Skipped []string
}

// SystemFile is the system's configuration.
const SystemFile = "/etc/forkd/config.toml"

// UserFile returns the path of the user's configuration, or "" if there is no home.
func UserFile(getenv func(string) string) string {
	if dir := getenv("XDG_CONFIG_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "forkd", "config.toml")
	}
	if home := getenv("HOME"); filepath.IsAbs(home) {
		return filepath.Join(home, ".config", "forkd", "config.toml")
	}
	return ""
}

// Sources are where values come from.
type Sources struct {
	Getenv func(string) string
	Files  []string            // "" and files that do not exist are skipped; a later one wins
	Flags  map[string][]string // by flag; only those that were given
}

// Load reads all sources.
func Load(src Sources) (*Config, error) {
	c := &Config{values: map[string]Value{}}
	for _, s := range Table() {
		c.values[s.Key] = Value{Setting: s, Origin: FromDefault}
	}
	for _, path := range src.Files {
		if err := c.readFile(path); err != nil {
			return nil, err
		}
	}
	for _, s := range Table() {
		if text := src.Getenv(s.Env); text != "" {
			texts := []string{text}
			if s.Kind == List {
				texts = split(text)
			}
			if err := c.set(s, texts, FromEnv); err != nil {
				return nil, err
			}
		}
		if texts, ok := src.Flags[s.Flag]; ok {
			if err := c.set(s, texts, FromFlag); err != nil {
				return nil, err
			}
		}
	}
	return c, nil
}

func split(text string) []string {
	var out []string
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}

// set checks a value and takes it.
func (c *Config) set(s Setting, texts []string, origin string) error {
	for _, text := range texts {
		if s.check == nil {
			break
		}
		if err := s.check(text); err != nil {
			return errdefs.As(errdefs.ErrInvalid, fmt.Errorf("%s: %w", s.in(origin), err))
		}
	}
	c.values[s.Key] = Value{Setting: s, Texts: texts, Origin: origin}
	return nil
}

// in names the setting as it is written at origin.
func (s Setting) in(origin string) string {
	switch origin {
	case FromFlag:
		return "--" + s.Flag
	case FromEnv:
		return "$" + s.Env
	}
	return fmt.Sprintf("%s: %s", origin, s.Key)
}

// All returns the values in the order of the table.
func (c *Config) All() []Value {
	var out []Value
	for _, s := range Table() {
		out = append(out, c.values[s.Key])
	}
	return out
}

// Text returns the value of a setting, or "" if nobody set it.
func (c *Config) Text(key string) string {
	if texts := c.values[key].Texts; len(texts) > 0 {
		return texts[len(texts)-1]
	}
	return ""
}

// List returns the values of a setting, none if nobody set it.
func (c *Config) List(key string) []string { return c.values[key].Texts }

// Origin tells where the value of a setting comes from.
func (c *Config) Origin(key string) string { return c.values[key].Origin }

// Int returns the value of a number, or 0 if nobody set it.
func (c *Config) Int(key string) int {
	n, err := strconv.Atoi(c.Text(key))
	if err != nil {
		return 0 // set checked it
	}
	return n
}

// Shown returns the value for people: a secret is only said to be there.
func (v Value) Shown() string {
	switch {
	case v.Origin == FromDefault:
		return v.Default
	case v.Secret:
		return "(set)"
	}
	return strings.Join(v.Texts, ", ")
}
