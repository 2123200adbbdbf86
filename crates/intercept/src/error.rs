//! Errors of the command, with what to do about them.

use std::{io, net::SocketAddr};

use nix::libc;

/// Exit code of Istio's `istio-validation` container, by which Istio's node agent finds pods to repair.
const NOT_INTERCEPTED: u8 = 126;

/// Error of the command `intercept`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process may not change the network of the pod.
    #[error(
        "{0}: not permitted. The container needs the capability NET_ADMIN (securityContext.capabilities.add). \
         In a cluster with Istio's CNI plugin it needs no capability: inject with `--interception cni`"
    )]
    Capability(&'static str),
    /// The kernel lacks a part of nf_tables.
    #[error(
        "installing packet rules ({families}): the kernel of the node lacks a part of nf_tables: {cause}. Load its \
         modules on the node: modprobe -a nf_tables nft_chain_nat nft_redir"
    )]
    Kernel {
        /// Names of the families.
        families: &'static str,
        /// The kernel's error.
        cause: io::Error,
    },
    /// A system call failed.
    #[error("{0}: {1}")]
    System(&'static str, #[source] io::Error),
    /// The process has another user and group than the sidecar.
    #[error(
        "--run-validation makes a connection as the sidecar does, so it needs the user or the group of --proxy-uid or \
         --proxy-gid; this process has user {user} and group {group}. Set runAsUser of the container, or remove the \
         option: rules that the command itself installs need no validation"
    )]
    NotTheSidecar {
        /// Effective user id.
        user: u32,
        /// Effective group id.
        group: u32,
    },
    /// Connections are not redirected.
    #[error(
        "connections of this pod are not intercepted: a connection to {probe} did not reach {listener} within \
         {seconds} s ({cause}). The CNI plugin has not installed its rules; the pod may have started before the plugin \
         was ready on this node. Delete the pod, or let the plugin's repair do so (cni.repair.deletePods=true)"
    )]
    NotIntercepted {
        /// Destination of the connection.
        probe: SocketAddr,
        /// Listener to which rules redirect it.
        listener: SocketAddr,
        /// Time limit.
        seconds: u64,
        /// What happened to the last connection.
        cause: String,
    },
    /// Standard output is closed.
    #[error("printing the rules: {0}")]
    Print(#[from] skysail_core::stdio::PrintError),
}

impl Error {
    /// Returns the exit code of the command.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, Self::NotIntercepted { .. }) { NOT_INTERCEPTED } else { 1 }
    }

    /// Returns the error of a system call that needs NET_ADMIN.
    pub(crate) fn of(what: &'static str, cause: io::Error) -> Self {
        if cause.raw_os_error() == Some(libc::EPERM) {
            Self::Capability(what)
        } else {
            Self::System(what, cause)
        }
    }
}
