// Package rest is forkd's REST front end: it turns requests of api/rest into
// calls of a [Service] and its answers into bodies, and decides nothing else.
//
// The one table from error class to status is in status.go; the one list of
// routes is in routes.go. A request passes, from the outside in: recovery from
// panics, request id and access log, who may ask (access.go), the route, the
// limits of its body (decode.go), idempotency (idempotency.go), the handler.
//
// What is refused changes nothing: bodies are read and checked whole before the
// service is called. Nothing a client sent in a header or body is logged.
package rest
