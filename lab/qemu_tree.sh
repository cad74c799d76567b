#!/bin/sh
# qemu_tree.sh TREE IMAGES HOST COMMAND...: runs a program of TREE, which sees the two folders at /lab/images and
# /lab/host. Call it in a mount namespace of its own (unshare --mount): the mounts end with the program.
set -eu
tree=$1
mount --bind "$2" "$tree/lab/images"
mount --bind "$3" "$tree/lab/host"
shift 3
exec chroot "$tree" "$@"
