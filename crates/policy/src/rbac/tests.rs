use std::rc::Rc;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::{
    config::text::{HeaderMatch, HeaderTest},
    peer::Certificate,
};

fn exact(text: &str) -> TextMatch {
    TextMatch::Exact(text.as_bytes().into())
}

fn rule(name: &str, permissions: Vec<Permission>, principals: Vec<Principal>) -> Rule {
    Rule { name: name.into(), permissions, principals }
}

fn policy(action: RuleAction, rules: Vec<Rule>) -> Arc<Policy> {
    Arc::new(Policy { rules: Some(Rules::new(action, rules)), shadow: None, shadow_prefix: "".into() })
}

fn method(name: &str) -> Permission {
    Permission::Header(HeaderMatch {
        name: ":method".into(),
        test: HeaderTest::Value(exact(name)),
        invert: false,
        missing_as_empty: false,
    })
}

fn known(uris: &[&str], dns: &[&str]) -> Peer {
    let strings = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
    let names = skysail_identity::Peer { uris: strings(uris), dns: strings(dns), ..Default::default() };
    Peer::secured(Some(Rc::new(Certificate::new(b"", names))), None)
}

fn subject<'a>(head: Option<&'a RequestHead>, peer: &'a Peer) -> Subject<'a> {
    Subject {
        head,
        peer,
        source: "10.0.0.1:5000".parse().unwrap(),
        remote: "10.0.0.9".parse().unwrap(),
        destination: "10.0.0.2:9080".parse().unwrap(),
        server_name: None,
        metadata: None,
    }
}

fn ask(policies: &[Arc<Policy>], subject: &Subject<'_>) -> Verdict {
    check(policies, subject, &mut Tally::default())
}

fn details(verdict: Verdict) -> String {
    match verdict {
        Verdict::Allow => "allow".into(),
        Verdict::Deny { details, .. } => details.into(),
    }
}

#[test]
fn deny_has_precedence_and_allow_needs_a_match() {
    let reviews = known(&["spiffe://cluster.local/ns/default/sa/reviews"], &[]);
    let caller = Principal::Authenticated(Some(exact("spiffe://cluster.local/ns/default/sa/reviews")));
    let name = "ns[default]-policy[ratings]-rule[0]";
    let policies = [
        policy(RuleAction::Deny, vec![rule(name, vec![method("DELETE")], vec![Principal::Any])]),
        policy(RuleAction::Allow, vec![rule("get", vec![method("GET")], vec![caller])]),
    ];
    let head = |method| RequestHead::build(method, "/", "ratings", &[]);
    let ask = |method, peer: &Peer| details(ask(&policies, &subject(Some(&head(method)), peer)));
    assert_eq!(ask("GET", &reviews), "allow");
    assert_eq!(
        ask("DELETE", &reviews),
        "rbac_access_denied_matched_policy[ns[default]-policy[ratings]-rule[0]]"
    );
    assert_eq!(ask("PUT", &reviews), "rbac_access_denied_matched_policy[none]");
    assert_eq!(ask("GET", &Peer::plain()), "rbac_access_denied_matched_policy[none]");
}

#[test]
fn an_empty_allow_policy_refuses_all_and_an_empty_deny_policy_none() {
    let peer = Peer::plain();
    let head = RequestHead::build("GET", "/", "h", &[]);
    let subject = subject(Some(&head), &peer);
    assert_ne!(ask(&[policy(RuleAction::Allow, Vec::new())], &subject), Verdict::Allow);
    assert_eq!(ask(&[policy(RuleAction::Deny, Vec::new())], &subject), Verdict::Allow);
    assert_eq!(ask(&[policy(RuleAction::Log, Vec::new())], &subject), Verdict::Allow);
    assert_eq!(ask(&[], &subject), Verdict::Allow);
}

#[test]
fn principals_match_the_client() {
    let uri = "spiffe://td/ns/a/sa/b";
    let peer = known(&[uri], &["b.a"]);
    let cidr =
        |text: &str, prefix_len| crate::config::listener::Cidr { address: text.parse().unwrap(), prefix_len };
    let head = RequestHead::build("GET", "/p?q", "h", &[]);
    let with = subject(Some(&head), &peer);
    let without = subject(None, &peer);
    let plain = Peer::plain();
    let stranger = subject(Some(&head), &plain);
    let named = |text: &str| Principal::Authenticated(Some(exact(text)));
    let cases = [
        (named(uri), &with, true),
        (named("b.a"), &with, true),
        (named("c"), &with, false),
        (named(uri), &stranger, false),
        (Principal::Not(Box::new(named(uri))), &stranger, true),
        (Principal::Authenticated(None), &with, true),
        (Principal::Authenticated(None), &stranger, false),
        (Principal::DirectIp(cidr("10.0.0.0", 29)), &with, true),
        (Principal::DirectIp(cidr("10.0.0.8", 29)), &with, false),
        (Principal::RemoteIp(cidr("10.0.0.8", 29)), &with, true),
        (Principal::Path(exact("/p")), &with, true),
        (Principal::Path(exact("/p")), &without, false),
        (Principal::All(vec![named(uri), Principal::Any]), &with, true),
        (Principal::All(vec![named("c"), Principal::Any]), &with, false),
        (Principal::OneOf(vec![named("c"), Principal::Any]), &with, true),
        (Principal::OneOf(Vec::new()), &with, false),
    ];
    for (principal, subject, expected) in cases {
        assert_eq!(identified(&principal, subject, Values::Any), expected, "{principal:?}");
    }
}

#[test]
fn permissions_match_the_operation() {
    let peer = Peer::plain();
    let head = RequestHead::build("GET", "/a/b?q", "h", &[]);
    let request = subject(Some(&head), &peer);
    let connection = Subject { server_name: Some("x.y"), ..subject(None, &peer) };
    let template = || Permission::Template(regex::bytes::Regex::new("^(?:/a/[^/]+)$").unwrap());
    let cases = [
        (Permission::Port(9080), &request, true),
        (Permission::Port(80), &request, false),
        (Permission::PortRange(9000..9080), &request, false),
        (Permission::PortRange(9000..9081), &request, true),
        (Permission::Path(exact("/a/b")), &request, true),
        (Permission::Path(exact("/a/b")), &connection, false),
        (template(), &request, true),
        (template(), &connection, false),
        (method("GET"), &request, true),
        (method("GET"), &connection, false),
        (Permission::Not(Box::new(method("GET"))), &connection, true),
        (Permission::ServerName(exact("x.y")), &connection, true),
        (Permission::ServerName(exact("")), &request, true),
        (Permission::All(Vec::new()), &request, true),
        (Permission::OneOf(vec![Permission::Any]), &request, true),
    ];
    for (permission, subject, expected) in cases {
        assert_eq!(permitted(&permission, subject, Values::Any), expected, "{permission:?}");
    }
}

#[test]
fn shadow_rules_are_counted_and_not_enforced() {
    let all = || vec![rule("all", vec![Permission::Any], vec![Principal::Any])];
    let shadow = Rules::new(RuleAction::Deny, all());
    let policies = [
        Arc::new(Policy { rules: None, shadow: Some(shadow), shadow_prefix: "dry_".into() }),
        policy(RuleAction::Allow, all()),
        policy(RuleAction::Deny, all()),
        policy(RuleAction::Deny, all()),
    ];
    let mut tally = Tally::default();
    let peer = Peer::plain();
    assert!(matches!(check(&policies, &subject(None, &peer), &mut tally), Verdict::Deny { .. }));
    let found = json!({"dry_shadow_effective_policy_id": "all", "dry_shadow_engine_result": "denied"});
    assert_eq!(Value::from_iter(std::mem::take(&mut tally.found)), found);
    assert_eq!(tally, Tally { allowed: 1, denied: 1, shadow_denied: 1, ..Tally::default() });
}

#[test]
fn rules_that_log_admit_all_and_say_whether_they_match() {
    let peer = Peer::plain();
    let hint = |rules: Vec<Rule>| {
        let mut tally = Tally::default();
        let policies = [policy(RuleAction::Log, rules), policy(RuleAction::Deny, Vec::new())];
        assert_eq!(check(&policies, &subject(None, &peer), &mut tally), Verdict::Allow);
        tally.log_metadata()
    };
    let all = vec![rule("all", vec![Permission::Any], vec![Principal::Any])];
    assert_eq!(hint(all), Some(("access_log_hint".to_owned(), true.into())));
    assert_eq!(hint(Vec::new()), Some(("access_log_hint".to_owned(), false.into())));
    assert_eq!(Tally::default().log_metadata(), None);
}

fn permission() -> impl Strategy<Value = (bool, u8)> {
    (any::<bool>(), 0_u8..4)
}

/// A permission that matches or not, nested in others that keep or invert it.
fn build((holds, depth): (bool, u8)) -> (Permission, bool) {
    let leaf = if holds { Permission::Any } else { Permission::OneOf(Vec::new()) };
    (0..depth).fold((leaf, holds), |(inner, holds), level| match level % 3 {
        0 => (Permission::Not(Box::new(inner)), !holds),
        1 => (Permission::All(vec![inner, Permission::Any]), holds),
        _ => (Permission::OneOf(vec![inner]), holds),
    })
}

proptest! {
    #[test]
    fn combinations_follow_boolean_logic(leaves in proptest::collection::vec(permission(), 0..5)) {
        let peer = Peer::plain();
        let subject = subject(None, &peer);
        let (all, results): (Vec<_>, Vec<_>) = leaves.iter().copied().map(build).unzip();
        let (some, _): (Vec<_>, Vec<_>) = leaves.into_iter().map(build).unzip();
        prop_assert_eq!(permitted(&Permission::All(all), &subject, Values::Every), results.iter().all(|holds| *holds));
        prop_assert_eq!(permitted(&Permission::OneOf(some), &subject, Values::Every), results.iter().any(|holds| *holds));
    }
}

#[test]
fn no_value_of_a_header_evades_a_rule() {
    let header = |text: &str, invert| HeaderMatch {
        name: "x".into(),
        test: HeaderTest::Value(exact(text)),
        invert,
        missing_as_empty: false,
    };
    let peer = Peer::plain();
    let permission = |text, invert| Permission::Header(header(text, invert));
    let principal = |text, invert| Principal::Header(header(text, invert));
    let not = |permission| Permission::Not(Box::new(permission));
    let not_id = |principal| Principal::Not(Box::new(principal));
    let cases = [
        (RuleAction::Allow, permission("good", false), Principal::Any),
        (RuleAction::Allow, permission("bad", true), Principal::Any),
        (RuleAction::Allow, not(permission("bad", false)), Principal::Any),
        (RuleAction::Allow, not(permission("good", true)), Principal::Any),
        (RuleAction::Allow, not(not(permission("good", false))), Principal::Any),
        (RuleAction::Allow, Permission::Any, principal("good", false)),
        (RuleAction::Deny, permission("bad", false), Principal::Any),
        (RuleAction::Deny, permission("good", true), Principal::Any),
        (RuleAction::Deny, not(permission("good", false)), Principal::Any),
        (RuleAction::Deny, not(permission("bad", true)), Principal::Any),
        (RuleAction::Deny, Permission::Any, not_id(principal("good", false))),
    ];
    for (number, (action, permission, principal)) in cases.into_iter().enumerate() {
        let policies = [policy(action, vec![rule("r", vec![permission], vec![principal])])];
        let allows = |values: &[&str]| {
            let fields: Vec<_> = values.iter().map(|value| ("x", *value)).collect();
            let head = RequestHead::build("GET", "/", "h", &fields);
            ask(&policies, &subject(Some(&head), &peer)) == Verdict::Allow
        };
        assert!(allows(&["good"]) && allows(&["good", "good"]), "case {number}");
        for values in [&["bad"][..], &["good", "bad"], &["bad", "good"]] {
            assert!(!allows(values), "case {number}: {values:?}");
        }
    }
}

/// Values of which random rules and subjects take some.
const PATHS: [&str; 4] = ["/a", "/a/b", "/b", "/"];
const NAMES: [&str; 3] = ["spiffe://td/ns/a/sa/b", "spiffe://td/ns/a/sa/c", "b.a"];
const ADDRESSES: [&str; 4] = ["10.0.0.1", "10.0.0.9", "2001:db8::1", "::ffff:10.0.0.1"];

/// Returns the rule of these numbers, whose conditions an index may or may not list.
fn numbered((permission, principal, other): (usize, usize, usize)) -> Rule {
    let path = |number: usize| PATHS[number % PATHS.len()];
    let prefix = |number| TextMatch::Prefix(path(number).as_bytes().into());
    let block = |number: usize| {
        let address: IpAddr = ADDRESSES[number % 3].parse().unwrap();
        let prefix_len = if address.is_ipv4() { [32, 29, 0][number % 3] } else { [128, 32, 0][number % 3] };
        let cut = |bits: u128, length: u32| {
            if prefix_len == 0 {
                0
            } else {
                bits >> (length - u32::from(prefix_len)) << (length - u32::from(prefix_len))
            }
        };
        let address = match address {
            IpAddr::V4(address) => IpAddr::V4((cut(address.to_bits().into(), 32) as u32).into()),
            IpAddr::V6(address) => IpAddr::V6(cut(address.to_bits(), 128).into()),
        };
        crate::config::listener::Cidr { address, prefix_len }
    };
    let named = |number: usize| Principal::Authenticated(Some(exact(NAMES[number % NAMES.len()])));
    let claim = |invert| crate::config::text::MetadataMatch {
        path: vec!["jwt".into(), "sub".into()],
        test: crate::config::text::ValueMatch::Text(exact(PATHS[other % 2])),
        invert,
    };
    let operation = match permission % 9 {
        0 => Permission::Path(exact(path(other))),
        1 => Permission::Path(prefix(other)),
        2 => {
            Permission::OneOf(vec![Permission::Path(exact(path(other))), Permission::Path(prefix(other + 1))])
        }
        3 => Permission::OneOf(vec![Permission::Path(exact(path(other))), Permission::Port(9080)]),
        4 => Permission::All(vec![Permission::Path(prefix(other)), method("GET")]),
        5 => Permission::Not(Box::new(Permission::Path(exact(path(other))))),
        6 => Permission::Path(TextMatch::IgnoreCase(Box::new(exact(path(other))))),
        7 => Permission::Metadata(claim(other.is_multiple_of(3))),
        _ => Permission::Any,
    };
    let client = match principal % 8 {
        0 => named(other),
        1 => Principal::OneOf(vec![named(other), named(other + 1)]),
        2 => Principal::OneOf(vec![named(other), Principal::DirectIp(block(other))]),
        3 => Principal::DirectIp(block(other)),
        4 => Principal::RemoteIp(block(other)),
        5 => Principal::All(vec![Principal::RemoteIp(block(other)), Principal::Path(prefix(other))]),
        6 => Principal::Metadata(claim(false)),
        _ => Principal::Any,
    };
    rule(&format!("{permission}-{principal}-{other}"), vec![operation], vec![client])
}

proptest! {
    #[test]
    fn an_index_changes_no_result(
        rules in proptest::collection::vec((0_usize..9, 0_usize..8, 0_usize..12), 0..40),
        (path, name, direct, remote, subject_of) in (0_usize..5, 0_usize..4, 0_usize..4, 0_usize..4, 0_usize..3),
    ) {
        let indexed = Rules::new(RuleAction::Allow, rules.into_iter().map(numbered).collect());
        let peer = NAMES.get(name).map_or_else(Peer::plain, |name| known(&[name], &["b.a"]));
        let head = PATHS.get(path).map(|path| RequestHead::build("GET", &format!("{path}?q"), "h", &[]));
        let metadata = json!({ "jwt": { "sub": PATHS.get(subject_of) } });
        let subject = Subject {
            source: SocketAddr::new(ADDRESSES[direct].parse().unwrap(), 5_000),
            remote: ADDRESSES[remote].parse().unwrap(),
            metadata: metadata.as_object(),
            ..subject(head.as_ref(), &peer)
        };
        let linear = indexed.rules.iter().find(|rule| matches(rule, &subject, Values::Every));
        prop_assert_eq!(matched(&indexed, &subject), linear.map(|rule| &rule.name));
    }
}

#[test]
fn rules_for_different_values_are_indexed() {
    let rules = (0..100).map(|number| {
        let path = Permission::Path(TextMatch::Prefix(format!("/{number}/").into_bytes().into()));
        rule(
            &format!("{number:03}"),
            vec![path, Permission::Path(exact(&format!("/{number}")))],
            vec![Principal::Any],
        )
    });
    let rules = Rules::new(RuleAction::Allow, rules.collect());
    let index = rules.index.as_ref().unwrap();
    let attributes = RuleAttributes {
        path: Some(b"/42/a"),
        names: None,
        direct: [10, 0, 0, 1].into(),
        remote: [10, 0, 0, 1].into(),
    };
    let mut examined = Vec::new();
    index.visit(&attributes, |_| None, |positions| examined.extend_from_slice(positions));
    assert_eq!(examined, [42]);
}
