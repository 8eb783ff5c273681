package rest

import (
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// Limits of the environment of a program.
const (
	maxEnv      = 1024
	maxEnvBytes = 128 << 10 // of one entry: the kernel's limit of one argument string
)

// checkEnv never names a value: it may be a secret.
func checkEnv(env map[string]string) error {
	if len(env) > maxEnv {
		return errdefs.New(errdefs.ErrInvalid, "%d environment variables are more than %d", len(env), maxEnv)
	}
	for k, v := range env {
		switch {
		case k == "" || strings.ContainsAny(k, "=\x00"):
			return errdefs.New(errdefs.ErrInvalid, "environment variable name %.80q is empty or holds '=' or NUL", k)
		case strings.Contains(v, "\x00"):
			return errdefs.New(errdefs.ErrInvalid, "value of environment variable %.80q holds a NUL", k)
		case len(k)+len(v)+2 > maxEnvBytes:
			return errdefs.New(errdefs.ErrInvalid, "environment variable %.80q has more than %d bytes", k, maxEnvBytes)
		}
	}
	return nil
}
