// Package buildnet is the way of a snapshot build to the package registries: an
// HTTP proxy that the daemon serves to one guest over its agent channel. The
// guest has no network device and resolves no names; who is connected to, and
// whether, is decided here.
//
// Allowed are the registries that the host's own pip, apt and npm use ([Detect]),
// and what a request adds. A name is resolved here, once for each connection,
// every address it has is checked, and one of the checked addresses is dialed, so
// a name cannot change its meaning in between. Addresses that are private, of
// this host, or serve cloud metadata are refused, the first two not for a
// registry that the host itself is configured for. Where the host itself needs a
// proxy, names are checked here and resolved by that one.
//
// The guest is hostile: what it sends is parsed by net/http with small limits,
// connections are counted, and nothing it says reaches a log unquoted.
//
// A [Network] belongs to one build. Serve runs until its context ends and joins
// everything it started.
package buildnet
