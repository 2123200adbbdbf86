//! Routing: selects the route of a request and applies it. Does no IO and reads no clock; the caller supplies random
//! numbers.
//!
//! The rules are Envoy's. The virtual host is selected by authority: exact, then the longest `*.suffix`, then the
//! longest `prefix.*`, then `*`. In it, the first matching route wins. The selection allocates nothing, except for an
//! authority with upper-case letters.

use std::borrow::Cow;

use serde_json::{Map, Value};

use crate::{
    config::{
        RouteTable,
        route::{
            Action, Forward, PathMatch, QueryMatch, Redirect, RedirectPath, Rewrite, Route, RouteMatch,
            Target, Targets, VirtualHost,
        },
    },
    matching,
};
use skysail_http::head::RequestHead;

mod mismatch;
#[cfg(test)]
mod tests;

pub use mismatch::mismatch;
pub(crate) use mismatch::{header_words, text_words};

/// A selected route.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// Route table.
    pub table: &'a RouteTable,
    /// Virtual host.
    pub host: &'a VirtualHost,
    /// Route.
    pub route: &'a Route,
    /// Selected cluster of a route with weighted clusters.
    pub target: Option<&'a Target>,
    /// A domain of the host equals the authority.
    pub exact: bool,
}

/// Reason for the absence of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoute {
    /// No route matches.
    NoMatch,
    /// The virtual host requires TLS.
    TlsRequired,
}

/// Selects the route of a request with this dynamic metadata.
///
/// # Errors
///
/// No route matches, or the virtual host requires TLS.
pub fn find<'a>(
    table: &'a RouteTable,
    head: &RequestHead,
    metadata: Option<&Map<String, Value>>,
    rng: &mut fastrand::Rng,
) -> Result<Found<'a>, NoRoute> {
    let (host, exact) = virtual_host(table, head.authority()).ok_or(NoRoute::NoMatch)?;
    if host.require_tls && !is_secure(head) {
        return Err(NoRoute::TlsRequired);
    }
    let mut routes = host.routes.iter();
    let route = routes.find(|route| matches(&route.matches, head, metadata, rng)).ok_or(NoRoute::NoMatch)?;
    let target = match &route.action {
        Action::Forward(Forward { targets: Targets::Weighted { total, targets }, .. }) => {
            weighted(*total, targets, rng)
        }
        _ => None,
    };
    Ok(Found { table, host, route, target, exact })
}

impl Forward {
    /// Returns the cluster of a request. `target` is the selected one of weighted clusters.
    pub fn cluster<'a>(&'a self, target: Option<&'a Target>, head: &'a RequestHead) -> Option<&'a str> {
        match &self.targets {
            Targets::Single(cluster) => Some(cluster),
            Targets::Weighted { .. } => Some(&target?.cluster),
            Targets::Header(name) => std::str::from_utf8(head.header(name)?).ok(),
        }
    }
}

/// Returns whether the client uses TLS to this proxy, or to the first proxy on the path (`x-forwarded-proto`).
pub fn is_secure(head: &RequestHead) -> bool {
    head.header("x-forwarded-proto") == Some(b"https")
}

/// Returns an authority in the form in which the table is indexed.
pub fn lookup_key<'a>(table: &RouteTable, authority: &'a str) -> Cow<'a, str> {
    lower_case(if table.ignore_port { without_port(authority) } else { authority })
}

/// Returns the virtual host of an authority, and whether a domain equals the authority.
pub fn virtual_host<'a>(table: &'a RouteTable, authority: &str) -> Option<(&'a VirtualHost, bool)> {
    let authority = lookup_key(table, authority);
    let exact = table.exact.get(&*authority);
    let index = exact
        .or_else(|| {
            let suffix = table.suffixes.iter().find(|(suffix, _)| {
                // The star matches at least one character.
                authority.len() > suffix.len() && authority.ends_with(&**suffix)
            });
            suffix.map(|(_, index)| index)
        })
        .or_else(|| {
            let prefix = table
                .prefixes
                .iter()
                .find(|(prefix, _)| authority.len() > prefix.len() && authority.starts_with(&**prefix));
            prefix.map(|(_, index)| index)
        })
        .or(table.any.as_ref())?;
    Some((table.hosts.get(*index)?, exact.is_some()))
}

/// Removes the port, which may be empty, from `a.b:80` or `[::1]:80`.
pub fn without_port(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, port))
            if port.bytes().all(|b| b.is_ascii_digit())
                // Otherwise this is the last group of an IPv6 address without brackets.
                && (host.ends_with(']') || !host.contains(':')) =>
        {
            host
        }
        _ => authority,
    }
}

fn lower_case(text: &str) -> Cow<'_, str> {
    if text.bytes().any(|b| b.is_ascii_uppercase()) {
        Cow::Owned(text.to_ascii_lowercase())
    } else {
        Cow::Borrowed(text)
    }
}

/// Returns whether a request matches.
pub fn matches(
    test: &RouteMatch,
    head: &RequestHead,
    metadata: Option<&Map<String, Value>>,
    rng: &mut fastrand::Rng,
) -> bool {
    path_matches(test, head.path_without_query().as_bytes())
        && matching::headers(&test.headers, head)
        && (test.query.is_empty() || query_matches(&test.query, head.query()))
        && (!test.grpc || matching::is_grpc(head))
        && test.metadata.iter().all(|test| matching::metadata(test, metadata))
        // Last, so that a route that cannot match uses no random number.
        && test.fraction.is_none_or(|share| sample(rng, share))
}

/// Returns true with a probability of `share` in millionths.
pub fn sample(rng: &mut fastrand::Rng, share: u32) -> bool {
    match share {
        0 => false,
        1_000_000.. => true,
        _ => rng.u32(..1_000_000) < share,
    }
}

fn path_matches(test: &RouteMatch, path: &[u8]) -> bool {
    let same = |a: &[u8], b: &[u8]| if test.case_sensitive { a == b } else { a.eq_ignore_ascii_case(b) };
    let begins = |start: &[u8]| path.get(..start.len()).is_some_and(|part| same(part, start));
    match &test.path {
        PathMatch::Connect => path.is_empty(),
        // Only CONNECT has no path. It matches only a CONNECT matcher.
        _ if path.is_empty() => false,
        PathMatch::Prefix(start) => begins(start),
        PathMatch::SeparatedPrefix(start) => {
            begins(start) && path.get(start.len()).is_none_or(|next| *next == b'/')
        }
        PathMatch::Exact(whole) => same(path, whole),
        PathMatch::Regex(regex) | PathMatch::Template(regex) => regex.is_match(path),
    }
}

/// Returns whether all query parameters match.
pub fn query_matches(tests: &[QueryMatch], query: Option<&str>) -> bool {
    tests.iter().all(|test| query_parameter_matches(test, query))
}

fn query_parameter_matches(test: &QueryMatch, query: Option<&str>) -> bool {
    let mut pairs =
        query.unwrap_or_default().split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let value = pairs.find(|(name, _)| *name == &*test.name).map(|(_, value)| value);
    match (&test.value, value) {
        (_, None) => false,
        (None, Some(_)) => true,
        (Some(test), Some(value)) => matching::text(test, value.as_bytes()),
    }
}

/// Selects one of weighted clusters.
pub fn weighted<'a>(total: u32, targets: &'a [Target], rng: &mut fastrand::Rng) -> Option<&'a Target> {
    let mut at = if total == 0 { 0 } else { rng.u32(..total) };
    let chosen = targets.iter().find(|target| {
        let here = at < target.weight;
        at = at.saturating_sub(target.weight);
        here
    });
    chosen.or(targets.last())
}

/// Returns the rewritten path with the query; `None` if the path would be empty, which leaves it unchanged.
pub fn rewrite(rewrite: &Rewrite, matched: &RouteMatch, path: &str) -> Option<String> {
    let at = path.find(['?', '#']).unwrap_or(path.len());
    let (path, query) = path.split_at(at);
    let mut new = String::new();
    match rewrite {
        Rewrite::Full(with) => new.push_str(with),
        Rewrite::Prefix(with) => {
            // One allocation holds the whole path.
            new.reserve(with.len() + path.len() + query.len());
            new.push_str(with);
            // Slashes are not merged, as in Envoy: `/a` → `/` rewrites `/a/b` to `//b`. Configurations depend on this.
            new.push_str(path.get(matched_len(matched, path)..).unwrap_or_default());
        }
        Rewrite::Regex(regex, with) => new.push_str(&substitute(regex, path, with)),
    }
    if new.is_empty() {
        return None;
    }
    new.push_str(query);
    Some(new)
}

/// Returns the length of the matched prefix, or of the whole path for another match.
fn matched_len(matched: &RouteMatch, path: &str) -> usize {
    match &matched.path {
        PathMatch::Prefix(start) | PathMatch::SeparatedPrefix(start) => start.len(),
        PathMatch::Exact(_) | PathMatch::Regex(_) | PathMatch::Template(_) | PathMatch::Connect => path.len(),
    }
}

/// Replaces every match; in the replacement `\1` is a group and `\\` a backslash.
fn substitute<'a>(regex: &regex::bytes::Regex, path: &'a str, with: &str) -> Cow<'a, str> {
    let replaced = regex.replace_all(path.as_bytes(), |found: &regex::bytes::Captures<'_>| {
        let mut out = Vec::new();
        let mut bytes = with.bytes();
        while let Some(byte) = bytes.next() {
            match (byte, bytes.clone().next()) {
                (b'\\', Some(digit @ b'0'..=b'9')) => {
                    bytes.next();
                    out.extend_from_slice(
                        found.get(usize::from(digit - b'0')).map_or(b"", |group| group.as_bytes()),
                    );
                }
                (b'\\', Some(b'\\')) => {
                    bytes.next();
                    out.push(b'\\');
                }
                _ => out.push(byte),
            }
        }
        out
    });
    match replaced {
        Cow::Borrowed(_) => Cow::Borrowed(path),
        Cow::Owned(bytes) => Cow::Owned(String::from_utf8_lossy(&bytes).into_owned()),
    }
}

/// Returns the `location` of a redirect. `scheme` is the scheme of the request, which in HTTP/2 may differ from that
/// of the connection.
pub fn location(redirect: &Redirect, head: &RequestHead, scheme: &str) -> String {
    let new_scheme = redirect.scheme.as_deref().unwrap_or(scheme);
    let came =
        head.header("x-forwarded-proto").and_then(|came| std::str::from_utf8(came).ok()).unwrap_or(scheme);
    let authority = head.authority();
    let host = match &redirect.host {
        Some(host) => host,
        None if redirect.port.is_some() || port_implied(authority, came, new_scheme) => {
            without_port(authority)
        }
        None => authority,
    };
    let port = redirect.port.map(|port| format!(":{port}")).unwrap_or_default();
    let (path, query) = redirect_path(redirect, head);
    let mark = if query.is_some() { "?" } else { "" };
    // Without the slash, the path would be part of the host.
    let slash = if path.starts_with('/') { "" } else { "/" };
    format!("{new_scheme}://{host}{port}{slash}{path}{mark}{}", query.unwrap_or_default())
}

/// Returns whether the authority's port is the default port of the old scheme, which would be wrong for the new one.
fn port_implied(authority: &str, scheme: &str, new_scheme: &str) -> bool {
    let port = authority.strip_prefix(without_port(authority)).unwrap_or_default();
    scheme != new_scheme && matches!((scheme, port), ("http", ":80") | ("https", ":443"))
}

fn redirect_path<'a>(redirect: &'a Redirect, head: &'a RequestHead) -> (&'a str, Option<&'a str>) {
    let query = head.query().filter(|_| !redirect.strip_query);
    match &redirect.path {
        // A query in the configured path replaces that of the request.
        Some(RedirectPath::Full(new)) => {
            new.split_once('?').map_or((new, query), |(path, query)| (path, Some(query)))
        }
        Some(RedirectPath::Rewritten(_)) | None => (head.path_without_query(), query),
    }
}

/// Returns the `location` for a request without TLS to a virtual host that requires TLS.
pub fn https_location(head: &RequestHead) -> String {
    format!("https://{}{}", head.authority(), head.path())
}
