//! Virtual hosts that the proxy requests from the control plane when a request needs them.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::sync::{mpsc, oneshot};

use skysail_http::map::Map;

use super::Published;

/// Maximum length in bytes of an authority: the longest domain name with a port.
pub const MAX_AUTHORITY: usize = 253 + 6;

/// On-demand discovery of one route table's virtual hosts. It outlives the table, which is rebuilt for each new host.
#[derive(Debug)]
pub struct Demand {
    /// Name of the route table.
    pub table: Arc<str>,
    /// Requested authorities for which no virtual host in effect has exactly that domain.
    pub known: Published<Map<Box<str>, RequestedAuthority>>,
    /// Channel to the discovery client.
    pub host_requests: mpsc::UnboundedSender<HostRequest>,
}

/// An authority that was requested from the control plane.
#[derive(Clone, Debug, Default)]
pub struct RequestedAuthority {
    /// Set by requests to this authority.
    pub used: Arc<UseMark>,
    /// The control plane has answered that no virtual host has exactly this domain. False if it did not answer in time.
    pub answered: bool,
    /// Secrets for which the virtual host of this authority waits, separated by commas; `None` if it waits for none.
    pub missing_secrets: Option<Box<str>>,
}

/// Discovery status of an authority for which no virtual host in effect has exactly that domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostStatus {
    /// The control plane has answered, or the authority cannot be requested: wildcards and the catch-all apply.
    Settled,
    /// The authority was requested, and the control plane did not answer in time. The subscription stays open.
    Unanswered,
    /// The authority has not been requested.
    Unknown,
}

/// A request that waits for the virtual host of its authority.
#[derive(Debug)]
pub struct HostRequest {
    /// Name of the route table.
    pub table: Arc<str>,
    /// Authority in lower case, as the route table looks it up.
    pub authority: Box<str>,
    /// Completed when the newest table and [`Demand::known`] have the result.
    pub done: oneshot::Sender<()>,
}

impl Demand {
    /// Returns the discovery status of an authority, and marks the authority as used.
    pub fn status(&self, authority: &str) -> HostStatus {
        if let Some(known) = self.known.load().get(authority) {
            known.used.mark();
            return if known.answered { HostStatus::Settled } else { HostStatus::Unanswered };
        }
        let sound = !authority.is_empty() && authority.len() <= MAX_AUTHORITY;
        if !sound || authority.bytes().any(|byte| byte <= b' ' || matches!(byte, b'/' | b'*' | 0x7f..)) {
            return HostStatus::Settled;
        }
        HostStatus::Unknown
    }

    /// Returns the secrets for which the virtual host of an authority waits, separated by commas.
    pub fn missing_secrets(&self, authority: &str) -> Option<Box<str>> {
        self.known.load().get(authority)?.missing_secrets.clone()
    }

    /// Requests the virtual host of an authority. The receiver completes when there is a result, or when none can come.
    pub fn request(&self, authority: &str) -> oneshot::Receiver<()> {
        let (done, result) = oneshot::channel();
        let host_request = HostRequest { table: Arc::clone(&self.table), authority: authority.into(), done };
        // After the discovery client has ended, the dropped request completes the receiver.
        let _ = self.host_requests.send(host_request);
        result
    }
}

/// Mark of an object that requests have used since the discovery client last cleared the mark.
#[derive(Debug, Default)]
pub struct UseMark(AtomicBool);

impl UseMark {
    /// Sets the mark. Writes only where that changes it: every request reads it, and a write would move the cache line.
    pub fn mark(&self) {
        if !self.0.load(Ordering::Relaxed) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Clears the mark; returns whether it was set.
    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}
