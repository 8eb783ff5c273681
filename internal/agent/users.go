package agent

import (
	"os"
	"strconv"
	"strings"
	"syscall"

	"forkd.dev/forkd/internal/errdefs"
)

// account is who a program runs as.
type account struct {
	name string
	home string
	cred *syscall.Credential // nil: as the agent itself
}

// maxAccountsFile bounds what is read of /etc/passwd and /etc/group.
const maxAccountsFile = 4 << 20

// lookupUser finds "name" or "uid[:gid]" in the accounts files; "" is root.
func lookupUser(spec string) (account, error) {
	own := account{name: "root", home: "/root"}
	if os.Getuid() != 0 { // only in tests and user-space kernels without root
		own = account{name: strconv.Itoa(os.Getuid()), home: os.Getenv("HOME")}
	}
	if spec == "" {
		return own, nil
	}
	user, group, hasGroup := strings.Cut(spec, ":")
	fields := findAccount("/etc/passwd", 7, func(f []string) bool { return f[0] == user || f[2] == user })
	uid, err := strconv.ParseUint(user, 10, 32)
	var gid uint64
	switch {
	case fields != nil:
		uid, err = strconv.ParseUint(fields[2], 10, 32)
		if err == nil {
			gid, err = strconv.ParseUint(fields[3], 10, 32)
		}
	case err == nil: // a number without an account
		fields, gid = []string{user, "", "", "", "", "/"}, uid
	}
	if err != nil {
		return account{}, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "user %.80q does not exist", user),
			"give a name of /etc/passwd or a number as uid or uid:gid")
	}
	acc := account{name: fields[0], home: fields[5], cred: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	if hasGroup {
		if acc.cred.Gid, err = lookupGroup(group); err != nil {
			return account{}, err
		}
	}
	acc.cred.Groups = groupsOf(acc.name, acc.cred.Gid)
	if uid == 0 && os.Getuid() == 0 && !hasGroup {
		acc.cred = nil
	}
	return acc, nil
}

func lookupGroup(name string) (uint32, error) {
	if f := findAccount("/etc/group", 4, func(f []string) bool { return f[0] == name }); f != nil {
		name = f[2]
	}
	gid, err := strconv.ParseUint(name, 10, 32)
	if err != nil {
		return 0, errdefs.New(errdefs.ErrInvalid, "group %.80q does not exist", name)
	}
	return uint32(gid), nil
}

// groupsOf lists the groups an account is a member of.
func groupsOf(name string, primary uint32) []uint32 {
	list := []uint32{primary}
	findAccount("/etc/group", 4, func(f []string) bool {
		for m := range strings.SplitSeq(f[3], ",") {
			if m == name && len(list) < 1024 {
				if gid, err := strconv.ParseUint(f[2], 10, 32); err == nil && uint32(gid) != primary {
					list = append(list, uint32(gid))
				}
			}
		}
		return false
	})
	return list
}

// findAccount returns the fields of the first line of a colon-separated file
// that has at least n of them and fits.
func findAccount(file string, n int, fits func([]string) bool) []string {
	text, err := readLimited(file, maxAccountsFile)
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Split(strings.TrimRight(line, "\n"), ":")
		if len(f) >= n && f[0] != "" && fits(f) {
			return f
		}
	}
	return nil
}
