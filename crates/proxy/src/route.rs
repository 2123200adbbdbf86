//! Which route a request takes and what that makes of it. Pure: no IO, no clock, dice from outside.
//!
//! Envoy's rules: a virtual host by authority (exact, then the longest `*.suffix`, then the longest `prefix.*`,
//! then `*`), in it the first route whose conditions all hold. Finding a route allocates nothing.

use std::{borrow::Cow, sync::Arc};

use crate::{
    config::{
        RouteTable,
        route::{
            HeaderOps, HostRewrite, PathMatch, QueryMatch, Redirect, RedirectPath, Rewrite, Route,
            RouteMatch, Targets, VirtualHost,
        },
    },
    head::RequestHead,
    matching,
};

#[cfg(test)]
mod tests;

/// A request's route.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// The virtual host it is in.
    pub host: &'a VirtualHost,
    /// The route.
    pub route: &'a Arc<Route>,
}

/// Finds a request's route.
pub fn find<'a>(table: &'a RouteTable, head: &RequestHead, dice: &mut fastrand::Rng) -> Option<Found<'a>> {
    // CONNECT alone has no path. It asks for a tunnel, which nothing here makes: were it passed on like other
    // requests, its connection would serve the next client with a server that takes all bytes for the tunnel's.
    if head.path().is_empty() {
        return None;
    }
    let host = virtual_host(table, head.authority())?;
    let path = head.path_without_query().as_bytes();
    let route = host.routes.iter().find(|route| matches(&route.matches, head, path, dice))?;
    Some(Found { host, route })
}

/// The virtual host that an authority belongs to.
pub fn virtual_host<'a>(table: &'a RouteTable, authority: &str) -> Option<&'a VirtualHost> {
    let authority = if table.ignore_port { without_port(authority) } else { authority };
    let authority = lower_case(authority);
    let index = table
        .exact
        .get(&*authority)
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
    table.hosts.get(*index)
}

/// `a.b:80` and `[::1]:80` without the port.
pub fn without_port(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, port))
            if !port.is_empty()
                && port.bytes().all(|b| b.is_ascii_digit())
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

fn matches(test: &RouteMatch, head: &RequestHead, path: &[u8], dice: &mut fastrand::Rng) -> bool {
    path_matches(test, path)
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

/// The cluster chosen for a request.
#[derive(Clone, Copy, Debug)]
pub struct Chosen<'a> {
    /// The cluster's name.
    pub cluster: &'a str,
    /// Header operations that come with the choice.
    pub headers: Option<&'a HeaderOps>,
    /// A new authority that comes with the choice.
    pub host: Option<&'a HostRewrite>,
}

/// Chooses among a route's targets; `None` when the header that should name the cluster is missing. Connections
/// have no head.
pub fn target<'a>(
    targets: &'a Targets,
    head: Option<&'a RequestHead>,
    dice: &mut fastrand::Rng,
) -> Option<Chosen<'a>> {
    let plain = |cluster| Chosen { cluster, headers: None, host: None };
    match targets {
        Targets::Single(cluster) => Some(plain(cluster)),
        Targets::Header(name) => std::str::from_utf8(head?.header(name)?).ok().map(plain),
        Targets::Weighted { total, targets } => {
            let mut at = if *total == 0 { 0 } else { dice.u32(..*total) };
            let chosen = targets.iter().find(|target| {
                let here = at < target.weight;
                at = at.saturating_sub(target.weight);
                here
            });
            let chosen = chosen.or(targets.last())?;
            Some(Chosen {
                cluster: &chosen.cluster,
                headers: Some(&chosen.headers),
                host: chosen.host.as_ref(),
            })
        }
    }
}

/// The new path with the query kept.
pub fn rewrite(rewrite: &Rewrite, matched: &RouteMatch, path: &str) -> String {
    let at = path.find(['?', '#']).unwrap_or(path.len());
    let (path, query) = path.split_at(at);
    let new = match rewrite {
        Rewrite::Full(new) => Cow::Borrowed(&**new),
        Rewrite::Prefix(new) => Cow::Owned(replace_prefix(matched, path, new)),
        Rewrite::Regex(regex, with) => substitute(regex, path, with),
    };
    format!("{new}{query}")
}

/// Replaces as much of the path as the route's prefix or exact match found.
fn replace_prefix(matched: &RouteMatch, path: &str, with: &str) -> String {
    let len = match &matched.path {
        PathMatch::Prefix(start) | PathMatch::SeparatedPrefix(start) => start.len(),
        PathMatch::Exact(_) | PathMatch::Regex(_) | PathMatch::Template(_) => path.len(),
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

/// Where a redirect leads: the `location` header. `scheme` is how the client came.
pub fn location(redirect: &Redirect, matched: &RouteMatch, head: &RequestHead, scheme: &str) -> String {
    let new_scheme = redirect.scheme.as_deref().unwrap_or(scheme);
    let authority = head.authority();
    let host = match &redirect.host {
        Some(host) => host,
        None if redirect.port.is_some() || port_implied(authority, scheme, new_scheme) => {
            without_port(authority)
        }
        None => authority,
    };
    let port = redirect.port.map(|port| format!(":{port}")).unwrap_or_default();
    let (path, query) = redirect_path(redirect, matched, head);
    let mark = if query.is_some() { "?" } else { "" };
    format!("{new_scheme}://{host}{port}{path}{mark}{}", query.unwrap_or_default())
}

/// Whether the authority's port is only the default of the old scheme, and would lead nowhere under the new one.
fn port_implied(authority: &str, scheme: &str, new_scheme: &str) -> bool {
    let port = authority.strip_prefix(without_port(authority)).unwrap_or_default();
    scheme != new_scheme && matches!((scheme, port), ("http", ":80") | ("https", ":443"))
}

fn redirect_path<'a>(
    redirect: &'a Redirect,
    matched: &RouteMatch,
    head: &'a RequestHead,
) -> (Cow<'a, str>, Option<&'a str>) {
    let query = head.query().filter(|_| !redirect.strip_query);
    let path = head.path_without_query();
    match &redirect.path {
        // Its own query takes the place of the request's.
        Some(RedirectPath::Full(new)) => match new.split_once('?') {
            Some((path, query)) => (Cow::Borrowed(path), Some(query)),
            None => (Cow::Borrowed(&**new), query),
        },
        Some(RedirectPath::Prefix(new)) => (Cow::Owned(replace_prefix(matched, path, new)), query),
        Some(RedirectPath::Regex(regex, with)) => (substitute(regex, path, with), query),
        None => (Cow::Borrowed(path), query),
    }
}

/// Where a virtual host that demands TLS sends a request that came without.
pub fn https_location(head: &RequestHead) -> String {
    format!("https://{}{}", head.authority(), head.path())
}
