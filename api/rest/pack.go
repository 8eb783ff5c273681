package rest

// Zstd is the media type of packs: the answer of GET /v1/snapshots/{ref}/pack and the
// body of POST /v1/packs. docs/format/pack.md describes them.
const Zstd = "application/zstd"
