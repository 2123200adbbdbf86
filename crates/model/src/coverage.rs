//! Whether a match of a VirtualService covers another one.

use crate::api::{
    StringMatch,
    virtual_service::{HttpMatchRequest, L4Match},
};

/// Returns whether `wide` matches every connection that `narrow` matches. Server names and addresses must be equal: the
/// most specific ones apply, whatever the order of the rules.
pub(crate) fn covers_connection(wide: &L4Match, narrow: &L4Match) -> bool {
    let port = |found: &L4Match| found.port.filter(|port| *port > 0);
    let same = |wide: &[String], narrow: &[String]| {
        wide.len() == narrow.len() && narrow.iter().all(|item| wide.contains(item))
    };
    same(&wide.sni_hosts, &narrow.sni_hosts)
        && same(&wide.destination_subnets, &narrow.destination_subnets)
        && (port(wide).is_none() || port(wide) == port(narrow))
        && wide.source_labels.iter().all(|(name, value)| narrow.source_labels.get(name) == Some(value))
        && (wide.source_namespace.is_none() || wide.source_namespace == narrow.source_namespace)
        && (wide.gateways.is_empty() || wide.gateways == narrow.gateways)
}

/// Returns whether `wide` matches every request that `narrow` matches.
pub(crate) fn covers_request(wide: &HttpMatchRequest, narrow: &HttpMatchRequest) -> bool {
    fn same<T: PartialEq>(wide: Option<&T>, narrow: Option<&T>) -> bool {
        wide.is_none() || wide == narrow
    }
    path_covers(wide, narrow)
        && same(wide.scheme.as_ref(), narrow.scheme.as_ref())
        && same(wide.method.as_ref(), narrow.method.as_ref())
        && same(wide.authority.as_ref(), narrow.authority.as_ref())
        && same(wide.port.as_ref(), narrow.port.as_ref())
        && same(wide.source_namespace.as_ref(), narrow.source_namespace.as_ref())
        && wide.headers.iter().all(|(name, value)| narrow.headers.get(name) == Some(value))
        && wide.query_params.iter().all(|(name, value)| narrow.query_params.get(name) == Some(value))
        && wide.source_labels.iter().all(|(name, value)| narrow.source_labels.get(name) == Some(value))
        && wide.without_headers.iter().all(|(name, value)| narrow.without_headers.get(name) == Some(value))
        && (wide.gateways.is_empty() || wide.gateways == narrow.gateways)
}

fn path_covers(wide: &HttpMatchRequest, narrow: &HttpMatchRequest) -> bool {
    let Some(path) = &wide.uri else { return true };
    match (path, &narrow.uri) {
        (StringMatch::Prefix(prefix), _) if prefix == "/" => true,
        (_, None) => false,
        (wide_path, Some(narrow_path)) if wide_path == narrow_path => {
            wide.ignore_uri_case || !narrow.ignore_uri_case
        }
        (StringMatch::Prefix(prefix), Some(StringMatch::Prefix(path) | StringMatch::Exact(path))) => {
            !wide.ignore_uri_case && !narrow.ignore_uri_case && path.starts_with(prefix.as_str())
        }
        _ => false,
    }
}
