package forkd

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
)

// Limits of what is read from a daemon.
const (
	maxAnswer = 512 << 20
	maxError  = 1 << 20
	maxLine   = 16 << 20
)

// path joins the segments of a route, each escaped.
func path(segments ...string) string {
	out := ""
	for _, s := range segments {
		out += "/" + url.PathEscape(s)
	}
	return out
}

// send makes a request and returns an answer of status 2xx; its body is the
// caller's to close. in is encoded as JSON, or is the reader of a tar archive; it
// and header may be nil.
func (c *Client) send(ctx context.Context, method, target string, in any, header http.Header) (*http.Response, error) {
	var content io.Reader
	media := rest.JSON
	if archive, ok := in.(io.Reader); ok {
		content, media = archive, rest.Tar
	} else if in != nil {
		raw, err := json.Marshal(in)
		if err != nil {
			return nil, errdefs.New(errdefs.ErrInvalid, "encode request: %w", err)
		}
		content = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+target, content)
	if err != nil {
		return nil, errdefs.New(errdefs.ErrInvalid, "make request: %w", err)
	}
	for k, v := range header {
		req.Header[k] = v
	}
	if in != nil {
		req.Header.Set("Content-Type", media)
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	res, err := c.http.Do(req)
	if err != nil {
		return nil, c.connectError(ctx, err)
	}
	if res.StatusCode/100 != 2 {
		defer res.Body.Close()
		return nil, answerError(res)
	}
	return res, nil
}

// answerError reads the error of a failed answer, also of one that is not forkd's.
func answerError(res *http.Response) error {
	raw, _ := io.ReadAll(io.LimitReader(res.Body, maxError)) // what came is enough to tell
	var e rest.Error
	if err := json.Unmarshal(raw, &e); err != nil || e.Error == "" {
		e = rest.Error{
			Error: fmt.Sprintf("%s answered %s: %.200s", res.Request.URL.Redacted(), res.Status, raw),
			Code:  errdefs.Code(errdefs.ErrInternal), Hint: "check that a forkd daemon is at this address",
		}
	}
	return &Error{Status: res.StatusCode, Code: e.Code, Message: e.Error, Hint: e.Hint, RequestID: res.Header.Get(rest.RequestID)}
}

// do makes a request whose answer has no content.
func (c *Client) do(ctx context.Context, method, target string, in any) error {
	res, err := c.send(ctx, method, target, in, nil)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// fetch makes a request and returns its decoded answer.
func fetch[T any](ctx context.Context, c *Client, method, target string, in any) (T, error) {
	var out, zero T
	res, err := c.send(ctx, method, target, in, nil)
	if err != nil {
		return zero, err
	}
	defer res.Body.Close()
	if err := json.NewDecoder(io.LimitReader(res.Body, maxAnswer)).Decode(&out); err != nil {
		if ctx.Err() != nil {
			return zero, ended(ctx)
		}
		return zero, errdefs.As(errdefs.ErrUnavailable, fmt.Errorf("read answer of %s %s: %w", method, target, err))
	}
	return out, nil
}

// ended gives the end of a context its class.
func ended(ctx context.Context) error { return errdefs.As(errdefs.Class(ctx.Err()), ctx.Err()) }

// errStop ends a stream at its last line.
var errStop = errors.New("last line")

// lines makes a request whose answer is NDJSON and hands each line to each, until
// that returns an error; errStop is the good end.
func (c *Client) lines(ctx context.Context, target string, in any, key string, each func([]byte) error) error {
	header := http.Header{"Accept": {rest.NDJSON}}
	if key != "" {
		header.Set(rest.IdempotencyKey, key)
	}
	res, err := c.send(ctx, http.MethodPost, target, in, header)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	scan := bufio.NewScanner(res.Body)
	scan.Buffer(nil, maxLine)
	for scan.Scan() {
		err := each(scan.Bytes())
		if errors.Is(err, errStop) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return ended(ctx)
	}
	return errTruncated("POST " + target)
}

// decodeLine decodes one line of a stream.
func decodeLine(raw []byte, v any) error {
	if err := json.Unmarshal(raw, v); err != nil {
		return errdefs.As(errdefs.ErrInternal, fmt.Errorf("line %.200q of the daemon: %w", raw, err))
	}
	return nil
}

// download writes the body that target answers with to w. What it is of stands in
// the errors: a failed write is w's own, an answer cut short is told as such.
func (c *Client) download(ctx context.Context, target, what string, w io.Writer) error {
	res, err := c.send(ctx, http.MethodGet, target, nil, nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	to := &sink{w: w}
	_, err = io.Copy(to, res.Body)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ended(ctx)
	case to.err != nil:
		return fmt.Errorf("write %s: %w", what, to.err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return errTruncated(what)
	}
	return errdefs.As(errdefs.ErrUnavailable, fmt.Errorf("read %s: %w", what, err))
}

// sink tells a failed write from a failed read.
type sink struct {
	w   io.Writer
	err error
}

func (s *sink) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	if err != nil {
		s.err = err
	}
	return n, err
}
