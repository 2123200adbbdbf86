//! Mutations of headers and query parameters. Each mutation sees the result of those before it.
//!
//! Source: Envoy's `header_mutation` filter.

use std::{collections::BTreeMap, fmt::Write as _, slice};

use crate::{
    config::{
        mutation::{HeaderMutations, Mutation, QueryMutation},
        route::AppendAction,
    },
    format, headers, matching,
    record::{Context, Record},
};
use skysail_http::head::{Headers, RequestHead, ResponseHead};

/// Applies the mutations of a request.
pub fn apply_request(mutations: &HeaderMutations, head: &mut RequestHead, record: &Record<'_>) {
    for mutation in &mutations.request {
        match mutation {
            Mutation::Op(op) => headers::apply_request(slice::from_ref(op), head, record),
            Mutation::RemoveMatching(test) => remove_matching(test, head),
        }
    }
    if !mutations.query.is_empty() && !head.path().is_empty() {
        let context = Context { record, request: Some(head), response: None };
        let path = with_query(&mutations.query, &context, head);
        head.set_path(&path);
    }
}

/// Applies the mutations of a response.
pub fn apply_response(
    mutations: &HeaderMutations,
    head: &mut ResponseHead,
    request: &RequestHead,
    record: &Record<'_>,
) {
    for mutation in &mutations.response {
        match mutation {
            Mutation::Op(op) => headers::apply_response(slice::from_ref(op), head, Some(request), record),
            Mutation::RemoveMatching(test) => remove_matching(test, head),
        }
    }
}

fn remove_matching(test: &crate::config::text::TextMatch, headers: &mut Headers) {
    headers.remove_if(|name, _| matching::text(test, &name.to_ascii_lowercase()));
}

/// Returns the path with the changed query. As in Envoy, parameters are sorted by name.
fn with_query(mutations: &[QueryMutation], context: &Context<'_>, head: &RequestHead) -> String {
    let mut parameters = BTreeMap::<String, Vec<String>>::new();
    for pair in head.query().into_iter().flat_map(|query| query.split('&')).filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        parameters.entry(name.to_owned()).or_default().push(value.to_owned());
    }
    for mutation in mutations {
        match mutation {
            QueryMutation::Remove(key) => _ = parameters.remove(&**key),
            QueryMutation::Add { key, value, action } => {
                let is_there = parameters.contains_key(&**key);
                let is_wanted = match action {
                    AppendAction::Append | AppendAction::Overwrite => true,
                    AppendAction::AddIfAbsent => !is_there,
                    AppendAction::OverwriteIfExists => is_there,
                };
                if is_wanted {
                    let mut text = Vec::new();
                    format::write(value, context, b"", &mut text);
                    let known = parameters.entry(key.to_string()).or_default();
                    if matches!(action, AppendAction::Overwrite | AppendAction::OverwriteIfExists) {
                        known.clear();
                    }
                    known.push(encoded(&text));
                }
            }
        }
    }
    let mut path = head.path_without_query().to_owned();
    let pairs = parameters.iter().flat_map(|(name, values)| values.iter().map(move |value| (name, value)));
    for (number, (name, value)) in pairs.enumerate() {
        let mark = if number == 0 { '?' } else { '&' };
        _ = write!(path, "{mark}{name}={value}");
    }
    path
}

/// Encodes all bytes but the unreserved characters (RFC 3986, section 2.3).
fn encoded(text: &[u8]) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                encoded.push(char::from(*byte));
            }
            _ => _ = write!(encoded, "%{byte:02X}"),
        }
    }
    encoded
}
