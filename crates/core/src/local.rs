//! Access to admin pages without a credential: granted to callers in the server's own network namespace, except to a
//! browser that sends a request for a web page of another origin.
//!
//! A browser on the same machine also connects from loopback. A page of another origin can make it send requests to
//! this server. To read the responses, the page's DNS server can resolve the page's own name to 127.0.0.1 (DNS
//! rebinding). `Origin` (RFC 6454) and `Sec-Fetch-Site` (W3C Fetch Metadata) show the first. `Host` shows the second:
//! it then has the name of the page's site.

use std::net::IpAddr;

use thiserror::Error;

/// Properties of a request to an admin port that decide access. Fields may be repeated; each value must pass.
#[derive(Clone, Debug)]
pub struct Caller<'a> {
    /// Address of the server's end of the connection, if known.
    pub local: Option<IpAddr>,
    /// Address of the caller's end.
    pub remote: IpAddr,
    /// Values of `Host`, and the authority of the request target.
    pub hosts: Vec<&'a [u8]>,
    /// Values of `Origin`.
    pub origins: Vec<&'a [u8]>,
    /// Values of `Sec-Fetch-Site`.
    pub sites: Vec<&'a [u8]>,
}

/// Reason why a caller is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The caller is outside this network namespace.
    #[error("the caller is not on this machine or in this pod")]
    Elsewhere,
    /// `Host` is a name that another party's DNS server may have resolved to this server.
    #[error("the field Host must be an IP address or localhost, as protection against DNS rebinding")]
    Host,
    /// A browser sends the request for a page of another origin.
    #[error("the request comes from a web page of another origin")]
    CrossSite,
}

impl Caller<'_> {
    /// Checks that the caller is in this network namespace and sends the request for no web page of another origin.
    ///
    /// # Errors
    /// Returns the reason why the caller is refused.
    pub fn check(&self) -> Result<(), Refusal> {
        if !self.is_here() {
            return Err(Refusal::Elsewhere);
        }
        if !self.hosts.iter().all(|host| is_here(host)) {
            return Err(Refusal::Host);
        }
        let own = |origin: &&[u8]| {
            let authority = origin.strip_prefix(b"http://");
            authority.is_some_and(|authority| self.hosts.iter().all(|host| *host == authority))
        };
        let direct = |site: &&[u8]| [b"none".as_slice(), b"same-origin"].contains(site);
        if !self.origins.iter().all(own) || !self.sites.iter().all(direct) {
            return Err(Refusal::CrossSite);
        }
        Ok(())
    }

    /// Returns whether both ends have loopback addresses, or the same address. The kernel drops packets from outside
    /// that carry one of its own addresses. One loopback end is not enough: a sidecar forwards connections of other
    /// pods to the pod's address from 127.0.0.6.
    fn is_here(&self) -> bool {
        let remote = self.remote.to_canonical();
        match self.local.map(|local| local.to_canonical()) {
            Some(local) => local == remote || (local.is_loopback() && remote.is_loopback()),
            None => false,
        }
    }
}

/// Returns whether a host, with or without a port, is an address or `localhost`. These are not resolved by DNS.
fn is_here(host: &[u8]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else { return false };
    let (name, port) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, "")) => (address, None),
        Some((address, rest)) => (address, rest.strip_prefix(':').or(Some("none"))),
        None => host.split_once(':').map_or((host, None), |(name, port)| (name, Some(port))),
    };
    let is_port = port.is_none_or(|port| port.parse::<u16>().is_ok());
    is_port && (name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller<'a>(local: &str, remote: &str, host: &'a str) -> Caller<'a> {
        Caller {
            local: Some(local.parse().unwrap()),
            remote: remote.parse().unwrap(),
            hosts: vec![host.as_bytes()],
            origins: Vec::new(),
            sites: Vec::new(),
        }
    }

    #[test]
    fn callers_of_the_same_namespace_are_local() {
        for (local, remote, is_local) in [
            ("127.0.0.1", "127.0.0.1", true),
            ("127.0.0.1", "127.0.0.9", true),
            ("::1", "::1", true),
            ("::ffff:127.0.0.1", "::ffff:127.0.0.1", true),
            ("10.0.0.1", "10.0.0.1", true),
            ("10.0.0.1", "::ffff:10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("10.0.0.1", "127.0.0.6", false),
            ("127.0.0.1", "10.0.0.1", false),
        ] {
            let result = caller(local, remote, "localhost").check();
            let expected = if is_local { Ok(()) } else { Err(Refusal::Elsewhere) };
            assert_eq!(result, expected, "{remote} to {local}");
        }
        let unknown = Caller { local: None, ..caller("::1", "::1", "localhost") };
        assert_eq!(unknown.check(), Err(Refusal::Elsewhere));
    }

    #[test]
    fn names_that_may_have_been_rebound_are_refused() {
        let check = |host| caller("127.0.0.1", "127.0.0.1", host).check();
        for good in ["localhost", "LocalHost:15014", "127.0.0.1:80", "10.0.0.1", "[::1]:15014", "[::1]"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in ["", "evil.example", "evil.example:15014", "localhost.evil.example", "127.0.0.1.nip.io"] {
            assert_eq!(check(bad), Err(Refusal::Host), "{bad}");
        }
        for bad in ["localhost:evil", "::1", "[::1]evil", "[::1", "127.0.0.1:80:80", "a@localhost", "\u{e9}"]
        {
            assert_eq!(check(bad), Err(Refusal::Host), "{bad}");
        }
        let mut two = caller("127.0.0.1", "127.0.0.1", "localhost");
        two.hosts.push(b"evil.example");
        assert_eq!(two.check(), Err(Refusal::Host));
        two.hosts.clear();
        assert_eq!(two.check(), Ok(()), "HTTP/1.0 has no Host");
    }

    #[test]
    fn foreign_web_pages_are_refused() {
        let check = |origins: &[&'static str], sites: &[&'static str]| {
            let mut caller = caller("127.0.0.1", "127.0.0.1", "localhost:15014");
            caller.origins = origins.iter().map(|origin| origin.as_bytes()).collect();
            caller.sites = sites.iter().map(|site| site.as_bytes()).collect();
            caller.check()
        };
        for (origins, sites) in
            [(&[][..], &[][..]), (&["http://localhost:15014"], &["same-origin"]), (&[], &["none"])]
        {
            assert_eq!(check(origins, sites), Ok(()), "{origins:?} {sites:?}");
        }
        for (origins, sites) in [
            (&["http://evil.example"][..], &[][..]),
            (&["null"], &[]),
            (&[""], &[]),
            (&["http://localhost:8080"], &[]),
            (&["https://localhost:15014"], &[]),
            (&["http://localhost:15014", "http://evil.example"], &[]),
            (&[], &["cross-site"]),
            (&[], &["same-site"]),
        ] {
            assert_eq!(check(origins, sites), Err(Refusal::CrossSite), "{origins:?} {sites:?}");
        }
    }
}
