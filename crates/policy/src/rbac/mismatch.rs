//! Why a rule does not match a request, as a sentence for people. Not part of the request path.

use super::{Subject, authenticated, identified, negated, path_is, permitted};
use crate::{
    config::{
        http::metadata,
        policy::{Permission, Principal, Rule, RuleAction},
        text::{HeaderMatch, MetadataMatch, TextMatch, ValueMatch},
    },
    matching::{self, Values},
    route::{header_words, text_words},
};

/// Maximum number of expected values in a sentence.
const MAX_EXPECTED: usize = 4;

/// A property of the request and the value that a test expects.
type FailedTest = (String, String);

/// Returns why a request does not match a rule with this action; `None` if it matches.
pub fn mismatch(rule: &Rule, action: RuleAction, subject: &Subject<'_>) -> Option<String> {
    let values = super::values_of(action);
    let is_permitted = rule.permissions.iter().any(|permission| permitted(permission, subject, values));
    let is_identified = rule.principals.iter().any(|principal| identified(principal, subject, values));
    let unmet: Vec<FailedTest> = match (is_identified, is_permitted) {
        (true, true) => return None,
        (false, _) => {
            rule.principals.iter().flat_map(|principal| unidentified(principal, subject, values)).collect()
        }
        (true, false) => {
            rule.permissions.iter().flat_map(|permission| unpermitted(permission, subject, values)).collect()
        }
    };
    Some(sentence(unmet))
}

/// Joins tests of the same property.
fn sentence(unmet: Vec<FailedTest>) -> String {
    let mut grouped: Vec<(String, Vec<String>)> = Vec::new();
    for (what, expected) in unmet {
        match grouped.iter_mut().find(|(known, _)| *known == what) {
            Some((_, list)) if list.contains(&expected) => {}
            Some((_, list)) => list.push(expected),
            None => grouped.push((what, vec![expected])),
        }
    }
    let parts: Vec<String> = grouped
        .into_iter()
        .map(|(what, mut expected)| {
            let more = expected.len().saturating_sub(MAX_EXPECTED);
            expected.truncate(MAX_EXPECTED);
            let more = if more > 0 { format!(" or {more} others") } else { String::new() };
            format!("{what}, expected: {}{more}", expected.join(" or "))
        })
        .collect();
    match parts.is_empty() {
        true => "the rule matches nothing".to_owned(),
        false => parts.join("; "),
    }
}

/// Returns the failed tests of a permission that does not match.
fn unpermitted(permission: &Permission, subject: &Subject<'_>, values: Values) -> Vec<FailedTest> {
    match permission {
        Permission::All(all) => {
            let first = all.iter().find(|one| !permitted(one, subject, values));
            first.map(|one| unpermitted(one, subject, values)).unwrap_or_default()
        }
        Permission::OneOf(some) => some.iter().flat_map(|one| unpermitted(one, subject, values)).collect(),
        Permission::Not(one) => not(permission_matches(one, subject, negated(values))),
        leaf => vec![permission_words(leaf, subject)],
    }
}

/// Returns the tests by which a permission matches.
fn permission_matches(permission: &Permission, subject: &Subject<'_>, values: Values) -> Vec<FailedTest> {
    match permission {
        Permission::All(all) => all.iter().flat_map(|one| permission_matches(one, subject, values)).collect(),
        Permission::OneOf(some) => {
            let matched = some.iter().filter(|one| permitted(one, subject, values));
            matched.flat_map(|one| permission_matches(one, subject, values)).collect()
        }
        Permission::Not(one) => not(unpermitted(one, subject, negated(values))),
        leaf => vec![permission_words(leaf, subject)],
    }
}

fn permission_words(permission: &Permission, subject: &Subject<'_>) -> FailedTest {
    let destination = subject.destination;
    match permission {
        Permission::Header(test) => of_header(test, subject),
        Permission::Path(test) => of_path(test, subject),
        Permission::Template(regex) => (path(subject), format!("the template {regex}")),
        Permission::Port(port) => (format!("port {}", destination.port()), port.to_string()),
        Permission::PortRange(range) => {
            (format!("port {}", destination.port()), format!("from {} below {}", range.start, range.end))
        }
        Permission::Ip(range) => (format!("destination {}", destination.ip()), cidr(range)),
        Permission::ServerName(test) => {
            (format!("SNI {:?}", subject.server_name.unwrap_or_default()), text_words(test))
        }
        Permission::Metadata(test) => of_metadata(test, subject),
        Permission::Any | Permission::All(_) | Permission::OneOf(_) | Permission::Not(_) => {
            ("any request".to_owned(), "any".to_owned())
        }
    }
}

/// Returns the failed tests of a principal that does not match.
fn unidentified(principal: &Principal, subject: &Subject<'_>, values: Values) -> Vec<FailedTest> {
    match principal {
        Principal::All(all) => {
            let first = all.iter().find(|one| !identified(one, subject, values));
            first.map(|one| unidentified(one, subject, values)).unwrap_or_default()
        }
        Principal::OneOf(some) => some.iter().flat_map(|one| unidentified(one, subject, values)).collect(),
        Principal::Not(one) => not(principal_matches(one, subject, negated(values))),
        leaf => vec![principal_words(leaf, subject)],
    }
}

/// Returns the tests by which a principal matches.
fn principal_matches(principal: &Principal, subject: &Subject<'_>, values: Values) -> Vec<FailedTest> {
    match principal {
        Principal::All(all) => all.iter().flat_map(|one| principal_matches(one, subject, values)).collect(),
        Principal::OneOf(some) => {
            let matched = some.iter().filter(|one| identified(one, subject, values));
            matched.flat_map(|one| principal_matches(one, subject, values)).collect()
        }
        Principal::Not(one) => not(unidentified(one, subject, negated(values))),
        leaf => vec![principal_words(leaf, subject)],
    }
}

fn principal_words(principal: &Principal, subject: &Subject<'_>) -> FailedTest {
    match principal {
        Principal::Header(test) => of_header(test, subject),
        Principal::Path(test) => of_path(test, subject),
        Principal::Authenticated(test) => {
            let expected = test.as_ref().map_or("TLS".to_owned(), text_words);
            let uri = subject.peer.names().and_then(|names| names.uris.first());
            match uri {
                Some(uri) => (format!("principal {uri}"), expected),
                None if authenticated(None, subject.peer) => ("no principal".to_owned(), expected),
                None => ("no principal (plain text)".to_owned(), expected),
            }
        }
        Principal::DirectIp(range) => (format!("peer address {}", subject.source.ip()), cidr(range)),
        Principal::RemoteIp(range) => (format!("client address {}", subject.remote), cidr(range)),
        Principal::Metadata(test) => of_metadata(test, subject),
        Principal::Any | Principal::All(_) | Principal::OneOf(_) | Principal::Not(_) => {
            ("any client".to_owned(), "any".to_owned())
        }
    }
}

fn not(tests: Vec<FailedTest>) -> Vec<FailedTest> {
    tests.into_iter().map(|(what, expected)| (what, format!("not {expected}"))).collect()
}

fn of_header(test: &HeaderMatch, subject: &Subject<'_>) -> FailedTest {
    match subject.head {
        Some(head) => header_words(test, head),
        None => ("a connection without a request".to_owned(), format!("header {}", test.name)),
    }
}

fn of_path(test: &TextMatch, subject: &Subject<'_>) -> FailedTest {
    debug_assert!(subject.head.is_some() || !path_is(test, subject), "a connection has no path");
    (path(subject), text_words(test))
}

fn path(subject: &Subject<'_>) -> String {
    match subject.head {
        Some(head) => format!("path {}", head.path_without_query()),
        None => "a connection without a request".to_owned(),
    }
}

/// Returns the value of a claim or of other dynamic metadata, and what a test expects.
fn of_metadata(test: &MetadataMatch, subject: &Subject<'_>) -> FailedTest {
    let not = if test.invert { "not " } else { "" };
    let expected = format!("{not}{}", value_words(&test.test));
    let [filter, key, claims @ ..] = &*test.path else { return ("no metadata".to_owned(), expected) };
    let names = |keys: &[Box<str>]| keys.iter().map(|key| &**key).collect::<Vec<_>>().join(".");
    let is_token = **filter == *metadata::JWT && !claims.is_empty();
    let has_token = matching::metadata_value(&[filter.clone(), key.clone()], subject.metadata).is_some();
    if is_token && !has_token {
        return ("no verified token".to_owned(), format!("claim {} {expected}", names(claims)));
    }
    let name =
        if is_token { format!("claim {}", names(claims)) } else { format!("metadata {}", names(&test.path)) };
    let what = match matching::metadata_value(&test.path, subject.metadata) {
        Some(value) => format!("{name} is {value}"),
        None => format!("{name} is absent"),
    };
    (what, expected)
}

fn value_words(test: &ValueMatch) -> String {
    match test {
        ValueMatch::Null => "null".to_owned(),
        ValueMatch::Number(number) => number.to_string(),
        ValueMatch::Range(from, to) => format!("a number from {from} below {to}"),
        ValueMatch::Text(test) => text_words(test),
        ValueMatch::Bool(is) => is.to_string(),
        ValueMatch::Present(_) => "present".to_owned(),
        // A value may be one of a list.
        ValueMatch::List(test) => value_words(test),
        ValueMatch::OneOf(some) => {
            let mut words: Vec<String> = some.iter().map(value_words).collect();
            words.dedup();
            words.join(" or ")
        }
    }
}

fn cidr(range: &crate::config::listener::Cidr) -> String {
    format!("{}/{}", range.address, range.prefix_len)
}

#[cfg(test)]
mod tests {
    use skysail_http::head::RequestHead;

    use super::*;
    use crate::peer::Peer;

    fn rule(permission: Permission, principal: Principal) -> Rule {
        Rule { name: "rule".into(), permissions: vec![permission], principals: vec![principal] }
    }

    fn exact(text: &str) -> TextMatch {
        TextMatch::Exact(text.as_bytes().into())
    }

    #[test]
    fn claims_are_named_with_their_values() {
        let test = |claim: &str| MetadataMatch {
            path: [metadata::JWT, "payload", claim].map(Into::into).into(),
            test: ValueMatch::OneOf(vec![
                ValueMatch::List(Box::new(ValueMatch::Text(exact("staff")))),
                ValueMatch::Text(exact("staff")),
            ]),
            invert: false,
        };
        let peer = Peer::plain();
        let found = serde_json::json!({metadata::JWT: {"payload": {"groups": ["guest"], "role": "staff"}}});
        for (metadata, claim, expected) in [
            (None, "groups", Some("no verified token, expected: claim groups \"staff\"")),
            (found.as_object(), "groups", Some("claim groups is [\"guest\"], expected: \"staff\"")),
            (found.as_object(), "team", Some("claim team is absent, expected: \"staff\"")),
            (found.as_object(), "role", None),
        ] {
            let subject = Subject {
                head: None,
                peer: &peer,
                source: ([10, 0, 0, 1], 1).into(),
                remote: [10, 0, 0, 1].into(),
                destination: ([10, 0, 0, 2], 80).into(),
                server_name: None,
                metadata,
            };
            let rule = rule(Permission::Any, Principal::Metadata(test(claim)));
            assert_eq!(mismatch(&rule, RuleAction::Allow, &subject).as_deref(), expected, "{claim}");
        }
    }

    #[test]
    fn the_unmet_tests_are_named() {
        let head = RequestHead::build("GET", "/a?b", "host", &[]);
        let peer = Peer::plain();
        let subject = Subject {
            head: Some(&head),
            peer: &peer,
            source: ([10, 0, 0, 1], 1).into(),
            remote: [10, 0, 0, 1].into(),
            destination: ([10, 0, 0, 2], 80).into(),
            server_name: None,
            metadata: None,
        };
        let paths = |list: &[&str]| {
            Permission::OneOf(list.iter().map(|path| Permission::Path(exact(path))).collect())
        };
        let not = |one| Permission::Not(Box::new(one));
        for (rule, expected) in [
            (rule(Permission::Any, Principal::Any), None),
            (rule(paths(&["/a"]), Principal::Any), None),
            (rule(paths(&["/b", "/c"]), Principal::Any), Some("path /a, expected: \"/b\" or \"/c\"")),
            (rule(not(paths(&["/b"])), Principal::Any), None),
            (rule(not(paths(&["/a", "/b"])), Principal::Any), Some("path /a, expected: not \"/a\"")),
            (
                rule(Permission::All(vec![paths(&["/a"]), Permission::Port(81)]), Principal::Any),
                Some("port 80, expected: 81"),
            ),
            (rule(Permission::OneOf(vec![]), Principal::Any), Some("the rule matches nothing")),
            (
                rule(Permission::Any, Principal::Authenticated(Some(exact("spiffe://a")))),
                Some("no principal (plain text), expected: \"spiffe://a\""),
            ),
        ] {
            assert_eq!(mismatch(&rule, RuleAction::Allow, &subject).as_deref(), expected);
            let matches = super::super::matches(&rule, &subject, super::super::values_of(RuleAction::Allow));
            assert_eq!(matches, expected.is_none());
        }
    }
}
