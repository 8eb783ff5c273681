package agentwire

import (
	"fmt"
	"io"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// The kinds of streams that the host opens. One that an agent does not know is
// refused: old snapshots hold old agents.
const (
	StreamHTTP = "http" // the agent's HTTP server
	StreamTCP  = "tcp:" // + port: a port of the guest's loopback

	// StreamBuild carries the network of a build. The host sends a tar archive, all
	// of it in BuildDir and BuildCacheDir, and gets an answer with the address of the
	// proxy: from then on programs can connect to it. The host's end of writing takes
	// all of it away (proxy, connections, both directories), which is answered too.
	StreamBuild = "build"
	// StreamBuildConn is accepted with the next connection that a program makes to
	// the proxy, whose bytes it then carries.
	StreamBuildConn = "build-conn"

	// StreamFiles carries a tar archive that is unpacked at the root, all of it
	// owned by root. The answer comes when everything is there.
	StreamFiles = "files"
	// StreamStart carries an encoded ExecRequest. Its program runs on by itself with
	// its output in StartLog; the answer comes when it runs, a second one with the
	// exit code if it ends while the stream is open.
	StreamStart = "start"
	// StreamStartLog is followed by an offset: at most StartLogChunk bytes of StartLog from there.
	StreamStartLog = "start-log:"
)

// Paths in the guest of a build.
const (
	BuildDir      = "/run/forkd/build"       // settings, in memory
	BuildCacheDir = "/var/cache/forkd-build" // what package managers keep, on the disk
	StartLog      = "/var/log/forkd-start.log"
)

// Limits of these streams.
const (
	StartLogChunk = 1 << 20
	maxAnswer     = 2 << 10
)

// WriteAnswer says on a stream that something was done, with a text, or failed.
func WriteAnswer(w io.Writer, text string, err error) error {
	line := "ok " + text
	if err != nil {
		line = "error " + errdefs.Code(err) + " " + err.Error()
	}
	line = strings.Map(func(r rune) rune {
		if r == '\n' || r == '\r' {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(line, "?"))
	_, werr := io.WriteString(w, line[:min(len(line), maxAnswer-1)]+"\n")
	return werr
}

// ReadAnswer reads what WriteAnswer wrote and nothing behind it. The peer's error
// is a claim, as in [CallError.Err].
func ReadAnswer(r io.Reader) (string, error) {
	var line []byte
	var one [1]byte
	for {
		if _, err := io.ReadFull(r, one[:]); err != nil {
			return "", fmt.Errorf("read answer: %w", err)
		}
		if one[0] == '\n' {
			break
		}
		if line = append(line, one[0]); len(line) > maxAnswer {
			return "", errdefs.New(errdefs.ErrGuest, "read answer: longer than %d bytes", maxAnswer)
		}
	}
	word, rest, _ := strings.Cut(string(line), " ")
	switch word {
	case "ok":
		return printable(rest), nil
	case "error":
		code, text, _ := strings.Cut(rest, " ")
		return "", CallError{Code: code, Message: text}.Err()
	}
	return "", errdefs.New(errdefs.ErrGuest, "read answer: %.80q is none", line)
}
