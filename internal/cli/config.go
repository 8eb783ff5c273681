package cli

import (
	"github.com/spf13/cobra"

	"forkd.dev/forkd/internal/config"
)

func (a *app) configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show the settings",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.configShowCommand())
	return cmd
}

// shownSetting is one line of config show.
type shownSetting struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Origin string `json:"origin"` // "flag", "environment", "default" or the path of a file
	Flag   string `json:"flag"`
	Env    string `json:"env"`
	Help   string `json:"help"`
}

func (a *app) configShowCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Show each setting with its value and where that comes from",
		Long: "Show each setting with its value and where that comes from.\n" +
			"A flag wins over the environment, that over ~/.config/forkd/config.toml, that over " + config.SystemFile + ".\n" +
			"The files hold lines like: memory_budget = \"60%\"",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			var list []shownSetting
			var rows [][]string
			for _, v := range a.config.All() {
				list = append(list, shownSetting{Key: v.Key, Value: v.Shown(), Origin: v.Origin, Flag: "--" + v.Flag, Env: v.Env, Help: v.Help})
				rows = append(rows, []string{v.Key, v.Shown(), v.Origin})
			}
			for _, path := range a.config.Skipped {
				a.note(path + " may not be read by this user, so it is left out")
			}
			if a.json {
				return a.printJSON(list)
			}
			return a.table([]string{"SETTING", "VALUE", "FROM"}, rows)
		},
	}
	registerSettings(cmd.Flags(), config.Daemon)
	return cmd
}
