//! Which route a request takes and what that makes of it. Pure: no IO, no clock, dice from outside.
//!
//! Envoy's rules: a virtual host by authority (exact, then the longest `*.suffix`, then the longest `prefix.*`,
//! then `*`), in it the first route whose conditions all hold. Finding a route allocates nothing.

use std::borrow::Cow;

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

#[cfg(test)]
mod tests;

/// A request's route.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// The table it is in.
    pub table: &'a RouteTable,
    /// The virtual host it is in.
    pub host: &'a VirtualHost,
    /// The route.
    pub route: &'a Route,
    /// The one of its weighted targets that the request goes to.
    pub target: Option<&'a Target>,
    /// The host has the authority by its full name.
    pub exact: bool,
}

/// Why a request has no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// None is for it.
    Route,
    /// Its virtual host is for TLS alone.
    Tls,
}

/// Finds a request's route.
///
/// # Errors
///
/// There is none.
pub fn find<'a>(
    table: &'a RouteTable,
    head: &RequestHead,
    dice: &mut fastrand::Rng,
) -> Result<Found<'a>, Missing> {
    let (host, exact) = virtual_host(table, head.authority()).ok_or(Missing::Route)?;
    if host.require_tls && !is_secure(head) {
        return Err(Missing::Tls);
    }
    let mut routes = host.routes.iter();
    let route = routes.find(|route| matches(&route.matches, head, dice)).ok_or(Missing::Route)?;
    let target = match &route.action {
        Action::Forward(Forward { targets: Targets::Weighted { total, targets }, .. }) => {
            weighted(*total, targets, dice)
        }
        _ => None,
    };
    Ok(Found { table, host, route, target, exact })
}

impl Forward {
    /// The name of the cluster that a request goes to, `target` being what was chosen among several.
    pub fn cluster<'a>(&'a self, target: Option<&'a Target>, head: &'a RequestHead) -> Option<&'a str> {
        match &self.targets {
            Targets::Single(cluster) => Some(cluster),
            Targets::Weighted { .. } => Some(&target?.cluster),
            Targets::Header(name) => std::str::from_utf8(head.header(name)?).ok(),
        }
    }
}

/// Whether the client speaks TLS, to this proxy or to the first one.
pub fn is_secure(head: &RequestHead) -> bool {
    head.header("x-forwarded-proto") == Some(b"https")
}

/// An authority as a table has it.
pub fn looked_up<'a>(table: &RouteTable, authority: &'a str) -> Cow<'a, str> {
    lower_case(if table.ignore_port { without_port(authority) } else { authority })
}

/// The virtual host that an authority belongs to, and whether by its full name.
pub fn virtual_host<'a>(table: &'a RouteTable, authority: &str) -> Option<(&'a VirtualHost, bool)> {
    let authority = looked_up(table, authority);
    let exact = table.exact.get(&*authority);
    let index = exact
        .or_else(|| {
            let suffix = table.suffixes.iter().find(|(suffix, _)| {
                // The star stands for at least one character.
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

/// `a.b:80` and `[::1]:80` without the port, which may be empty.
pub fn without_port(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, port))
            if port.bytes().all(|b| b.is_ascii_digit())
                // Else it is the last group of an IPv6 address without brackets.
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

/// Whether a route, or anything else that asks in its words, is for a request.
pub fn matches(test: &RouteMatch, head: &RequestHead, dice: &mut fastrand::Rng) -> bool {
    path_matches(test, head.path_without_query().as_bytes())
        && matching::headers(&test.headers, head)
        && test.query.iter().all(|query| query_matches(query, head.query()))
        && (!test.grpc || matching::is_grpc(head))
        // Last, so that a route that cannot apply throws no dice.
        && test.fraction.is_none_or(|share| roll(dice, share))
}

/// Whether chance, with this share in millionths, says yes.
pub fn roll(dice: &mut fastrand::Rng, share: u32) -> bool {
    match share {
        0 => false,
        1_000_000.. => true,
        _ => dice.u32(..1_000_000) < share,
    }
}

fn path_matches(test: &RouteMatch, path: &[u8]) -> bool {
    let same = |a: &[u8], b: &[u8]| if test.case_sensitive { a == b } else { a.eq_ignore_ascii_case(b) };
    let begins = |start: &[u8]| path.get(..start.len()).is_some_and(|part| same(part, start));
    match &test.path {
        PathMatch::Connect => path.is_empty(),
        // CONNECT, which alone has no path, is taken only where it is meant.
        _ if path.is_empty() => false,
        PathMatch::Prefix(start) => begins(start),
        PathMatch::SeparatedPrefix(start) => {
            begins(start) && path.get(start.len()).is_none_or(|next| *next == b'/')
        }
        PathMatch::Exact(whole) => same(path, whole),
        PathMatch::Regex(regex) | PathMatch::Template(regex) => regex.is_match(path),
    }
}

fn query_matches(test: &QueryMatch, query: Option<&str>) -> bool {
    let mut pairs =
        query.unwrap_or_default().split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let value = pairs.find(|(name, _)| *name == &*test.name).map(|(_, value)| value);
    match (&test.value, value) {
        (_, None) => false,
        (None, Some(_)) => true,
        (Some(test), Some(value)) => matching::text(test, value.as_bytes()),
    }
}

/// Chooses among weighted targets.
pub fn weighted<'a>(total: u32, targets: &'a [Target], dice: &mut fastrand::Rng) -> Option<&'a Target> {
    let mut at = if total == 0 { 0 } else { dice.u32(..total) };
    let chosen = targets.iter().find(|target| {
        let here = at < target.weight;
        at = at.saturating_sub(target.weight);
        here
    });
    chosen.or(targets.last())
}

/// The new path with the query kept; `None` where nothing would be left of the path: then it stays as it is.
pub fn rewrite(rewrite: &Rewrite, matched: &RouteMatch, path: &str) -> Option<String> {
    let at = path.find(['?', '#']).unwrap_or(path.len());
    let (path, query) = path.split_at(at);
    let new = match rewrite {
        Rewrite::Full(new) => Cow::Borrowed(&**new),
        Rewrite::Prefix(new) => Cow::Owned(replace_prefix(matched, path, new)),
        Rewrite::Regex(regex, with) => substitute(regex, path, with),
    };
    (!new.is_empty()).then(|| format!("{new}{query}"))
}

/// Replaces as much of the path as the route's prefix or exact match found.
fn replace_prefix(matched: &RouteMatch, path: &str, with: &str) -> String {
    let len = match &matched.path {
        PathMatch::Prefix(start) | PathMatch::SeparatedPrefix(start) => start.len(),
        PathMatch::Exact(_) | PathMatch::Regex(_) | PathMatch::Template(_) | PathMatch::Connect => path.len(),
    };
    // No care is taken of slashes, as in Envoy: `/a` → `/` makes `//b` of `/a/b`. Configuration knows that.
    format!("{with}{}", path.get(len..).unwrap_or_default())
}

/// Replaces every find; `\1` in the replacement stands for a group, `\\` for a backslash.
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

/// Where a redirect leads: the `location` header. `scheme` is what the client asked for, which in HTTP/2 need not be how it
/// came.
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
    // Without it, the path would go on with the host.
    let slash = if path.starts_with('/') { "" } else { "/" };
    format!("{new_scheme}://{host}{port}{slash}{path}{mark}{}", query.unwrap_or_default())
}

/// Whether the authority's port is only the default of how the client came, and would lead nowhere under the new scheme.
fn port_implied(authority: &str, scheme: &str, new_scheme: &str) -> bool {
    let port = authority.strip_prefix(without_port(authority)).unwrap_or_default();
    scheme != new_scheme && matches!((scheme, port), ("http", ":80") | ("https", ":443"))
}

fn redirect_path<'a>(redirect: &'a Redirect, head: &'a RequestHead) -> (&'a str, Option<&'a str>) {
    let query = head.query().filter(|_| !redirect.strip_query);
    match &redirect.path {
        // Its own query takes the place of the request's.
        Some(RedirectPath::Full(new)) => {
            new.split_once('?').map_or((new, query), |(path, query)| (path, Some(query)))
        }
        Some(RedirectPath::Rewritten(_)) | None => (head.path_without_query(), query),
    }
}

/// Where a virtual host that demands TLS sends a request that came without.
pub fn https_location(head: &RequestHead) -> String {
    format!("https://{}{}", head.authority(), head.path())
}
