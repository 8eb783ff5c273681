package cli

import (
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"forkd.dev/forkd/internal/config"
	"forkd.dev/forkd/internal/errdefs"
)

func (a *app) serveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon",
		Long: "Run the daemon. Each flag has a variable and a key in the configuration files, see: forkd config show.\n" +
			"Sandboxes go on when the daemon ends, and the next one takes them over.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if a.env.Serve == nil {
				return absent("serve")
			}
			o, err := serveOptions(a.config)
			if err != nil {
				return err
			}
			return a.env.Serve(cmd.Context(), o)
		},
	}
	registerSettings(cmd.Flags(), config.Daemon)
	return cmd
}

// settingFlag marks the flags of settings: other commands have flags of the same
// name and another meaning.
const settingFlag = "forkd.setting"

// registerSettings makes the flags of the settings of one scope.
func registerSettings(f *pflag.FlagSet, scope config.Scope) {
	for _, s := range config.Table() {
		if s.Scope == scope {
			registerSetting(f, s)
		}
	}
}

// engineFlag makes the flag of the engine on a command that can start a daemon or
// looks at what one would do.
func engineFlag(cmd *cobra.Command) {
	for _, s := range config.Table() {
		if s.Key == "engine" {
			registerSetting(cmd.Flags(), s)
		}
	}
}

// registerSetting makes the flags of one setting.
func registerSetting(f *pflag.FlagSet, s config.Setting) {
	help := s.Help + " ($" + s.Env
	if s.Default != "" {
		help += "; default " + s.Default
	}
	help += ")"
	for _, name := range []string{s.Flag, s.Alias} {
		switch {
		case name == "":
		case s.Kind == config.List && s.Key == "prepare":
			f.StringSlice(name, nil, help)
		case s.Kind == config.List:
			f.StringArray(name, nil, help)
		case s.Kind == config.Number:
			f.Int(name, 0, help)
		default:
			f.String(name, "", help)
		}
		if name != "" {
			_ = f.SetAnnotation(name, settingFlag, []string{s.Key}) // it exists
		}
	}
	if s.Alias != "" {
		_ = f.MarkHidden(s.Alias) // it exists
	}
}

// loadConfig finds the value of every setting, for cmd.
func (a *app) loadConfig(cmd *cobra.Command) error {
	flags := map[string][]string{}
	for _, s := range config.Table() {
		texts, err := flagTexts(cmd.Flags(), s)
		if err != nil {
			return err
		}
		if texts != nil {
			flags[s.Flag] = texts
		}
	}
	c, err := config.Load(config.Sources{
		Getenv: a.env.Getenv,
		Files:  []string{a.env.SystemConfig, config.UserFile(a.env.Getenv)},
		Flags:  flags,
	})
	if err != nil {
		return err
	}
	a.config = c
	return nil
}

// flagTexts returns what a setting's flag was given, or nil.
func flagTexts(f *pflag.FlagSet, s config.Setting) ([]string, error) {
	var given *pflag.Flag
	for _, name := range []string{s.Flag, s.Alias} {
		found := f.Lookup(name)
		if found == nil || !found.Changed || found.Annotations[settingFlag] == nil {
			continue
		}
		if given != nil {
			return nil, errdefs.New(errdefs.ErrInvalid, "--%s and --%s are the same: use one of them", given.Name, name)
		}
		given = found
	}
	if given == nil {
		return nil, nil
	}
	if list, ok := given.Value.(pflag.SliceValue); ok {
		return list.GetSlice(), nil
	}
	return []string{given.Value.String()}, nil
}

// serveOptions turns settings into what the daemon is told.
func serveOptions(c *config.Config) (ServeOptions, error) {
	o := ServeOptions{
		Bind: c.List("bind"), TokenFile: c.Text("token_file"), Prepare: c.List("prepare"),
		MaxSandboxes: c.Int("max_sandboxes"), Engine: "auto", AllowedHosts: c.List("allow_host"),
	}
	if engine := c.Text("engine"); engine != "" {
		o.Engine = engine
	}
	var err error
	if o.DataDir, err = config.Expand(c.Text("data_dir")); err != nil {
		return o, err
	}
	if text := c.Text("memory_budget"); text != "" {
		if o.MemoryBudget, err = config.ParseBudget(text); err != nil {
			return o, errdefs.As(errdefs.ErrInvalid, err)
		}
	}
	if text := c.Text("resident_max"); text != "" {
		if o.ResidentMax, err = config.ParseBudget(text); err != nil {
			return o, errdefs.As(errdefs.ErrInvalid, err)
		}
	}
	if text := c.Text("min_free"); text != "" {
		mib, err := config.ParseAmount(text)
		if err != nil {
			return o, errdefs.As(errdefs.ErrInvalid, err)
		}
		o.MinFreeMiB = &mib
	}
	if level := c.Text("log_level"); level != "" {
		if err := o.LogLevel.UnmarshalText([]byte(level)); err != nil {
			return o, errdefs.As(errdefs.ErrInvalid, fmt.Errorf("log level: %w", err))
		}
	}
	return o, nil
}
