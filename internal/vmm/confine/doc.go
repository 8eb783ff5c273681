// Package confine takes rights away from a process that runs a guest, and never gives any
// back: own uid, empty root, no_new_privs, limits, Landlock where the kernel has it, and
// system call filters, one for the process and a narrower one for threads that run a
// vCPU. A forbidden call ends the process: whoever makes one has been taken over.
//
// [Rights] comes first, [Filter] last. Without root some of it is lost; both say what.
package confine
