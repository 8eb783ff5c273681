# forkd: `make help` lists what there is. Everything CI does is a target here.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
PROGRAMS := forkd.dev/forkd/internal/programs
AGENT := internal/programs/embedded/forkd-agent
MONITOR := internal/programs/embedded/forkd-vmm
FUZZTIME ?= 10s
TESTFLAGS ?=
GOLANGCI_LINT_VERSION := v2.5.0
# What the tree is clean of and CI keeps it clean of; lint-all runs all that .golangci.yml names.
LINTERS := govet,staticcheck,revive,depguard,forbidigo,funlen,gocognit,nolintlint,unconvert

.PHONY: help setup build run test test-kvm race lint lint-all lint-light fuzz bench leakcheck clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: ## install the Debian packages that are missing (root or sudo)
	@scripts/setup.sh

build: ## build bin/forkd with the guest agent and the machine monitor inside
	@mkdir -p bin
	@# No commit in the agent: its bytes, and so the images made with it, change only with its code.
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w" -o $(AGENT) ./cmd/forkd-agent
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w" -o $(MONITOR) ./cmd/forkd-vmm
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X $(PROGRAMS).stamp=$(VERSION)" -o bin/forkd ./cmd/forkd

run: setup build ## set up, build, and show 20 forks that answer
	bin/forkd demo -n 20

test: setup build lint-light ## everything: unit, conformance, real VMs, leak check
	@scripts/test.sh $(TESTFLAGS)

test-kvm: setup ## the kvm engine: ring-3 guests here, stock kernels in a machine with emulated AMD-V
	@scripts/test-kvm.sh $(NESTEDFLAGS)

race: ## unit tests with the race detector (needs gcc)
	@scripts/test.sh -race -short $(TESTFLAGS)

lint-light: ## gofmt, go vet and the architecture test
	@unformatted=$$(gofmt -l $$(git ls-files --cached --others --exclude-standard '*.go')); \
	  if [ -n "$$unformatted" ]; then echo "not gofmt-ed:"; echo "$$unformatted"; exit 1; fi
	go vet ./...
	go test -count=1 ./internal/archtest

lint: lint-light ## lint-light and golangci-lint (built from source the first time: minutes)
	@mkdir -p .cache/bin
	@test -x .cache/bin/golangci-lint-$(GOLANGCI_LINT_VERSION) || { \
	  GOBIN=$(CURDIR)/.cache/bin go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT_VERSION) && \
	  mv .cache/bin/golangci-lint .cache/bin/golangci-lint-$(GOLANGCI_LINT_VERSION); }
	.cache/bin/golangci-lint-$(GOLANGCI_LINT_VERSION) run --enable-only $(LINTERS) ./...

lint-all: lint ## and the linters whose findings are not all settled yet (CONTRIBUTING.md)
	.cache/bin/golangci-lint-$(GOLANGCI_LINT_VERSION) run ./...

fuzz: ## run each fuzz target for FUZZTIME (10s); FUZZTIME_OTHERS is for less exposed ones
	@scripts/fuzz.sh $(FUZZTIME) $(FUZZTIME_OTHERS)

bench: ## Go benchmarks of the pure packages
	go test -run '^$$' -bench . -benchmem ./...

leakcheck: ## list what is left of forkd on this host; fails if there is anything
	@scripts/leakcheck.sh

clean: ## remove what make built (not images or snapshots)
	rm -rf bin .cache $(AGENT) $(MONITOR)
