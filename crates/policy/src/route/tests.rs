use std::{collections::HashMap, sync::Arc};

use proptest::prelude::*;
use regex::bytes::Regex;

use super::*;
use crate::config::{
    route::{DirectResponse, HeaderOps},
    text::{HeaderMatch, HeaderTest, TextMatch},
};

fn rng() -> fastrand::Rng {
    fastrand::Rng::with_seed(1)
}

fn bytes(text: &str) -> Box<[u8]> {
    text.as_bytes().into()
}

fn by_path(path: PathMatch) -> RouteMatch {
    RouteMatch {
        path,
        case_sensitive: true,
        headers: Vec::new(),
        query: Vec::new(),
        metadata: Box::default(),
        grpc: false,
        fraction: None,
    }
}

fn prefix(text: &str) -> RouteMatch {
    by_path(PathMatch::Prefix(bytes(text)))
}

fn route(name: &str, matches: RouteMatch) -> Route {
    Route {
        name: name.into(),
        matches,
        action: Action::Direct(DirectResponse { status: 200, body: Box::default() }),
        headers: HeaderOps::default(),
        filters: Vec::new(),
        metadata: None,
        decorator: None,
        tracing: None,
        stat_prefix: None,
    }
}

/// Returns a table of hosts with these domains and one route each, indexed as the translation does it.
fn table(domains: &[&str], ignore_port: bool) -> RouteTable {
    let mut table = RouteTable { ignore_port, ..RouteTable::default() };
    for (index, domain) in domains.iter().enumerate() {
        table.hosts.push(Arc::new(VirtualHost {
            name: (*domain).into(),
            routes: vec![route(domain, prefix("/"))],
            headers: HeaderOps::default(),
            include_attempt_count: false,
            require_tls: false,
            limits: Vec::new(),
            used: Arc::default(),
        }));
        assert!(table.put(domain, index));
    }
    table
}

#[test]
fn connect_has_no_route() {
    let mut table = table(&["*"], false);
    Arc::get_mut(&mut table.hosts[0]).unwrap().routes =
        vec![route("all", by_path(PathMatch::Regex(Regex::new(".*").unwrap())))];
    let found =
        |method, path| find(&table, &RequestHead::build(method, path, "a:1", &[]), None, &mut rng()).is_ok();
    assert!(found("GET", "/"));
    assert!(!found("CONNECT", ""));
}

#[test]
fn hosts_are_selected_by_exact_then_longest_domain() {
    let table = table(&["a.example", "*.example", "*.b.example", "a.*", "a.b.*", "a.example:80", "*"], false);
    let cases = [
        ("a.example", "a.example"),
        ("A.Example", "a.example"),
        ("a.example:80", "a.example:80"),
        ("c.example", "*.example"),
        ("c.b.example", "*.b.example"),
        (".example", "*"),
        ("a.org", "a.*"),
        ("a.b.org", "a.b.*"),
        ("a.example:81", "a.*"),
        ("other", "*"),
        ("", "*"),
    ];
    for (authority, expected) in cases {
        assert_eq!(&*virtual_host(&table, authority).unwrap().0.name, expected, "{authority}");
    }
}

#[test]
fn ports_are_ignored_where_configured() {
    let table = table(&["reviews", "[::1]"], true);
    assert_eq!(&*virtual_host(&table, "reviews:9080").unwrap().0.name, "reviews");
    assert_eq!(&*virtual_host(&table, "[::1]:80").unwrap().0.name, "[::1]");
    assert!(virtual_host(&table, "reviews:x").is_none());
    assert_eq!(without_port("::1"), "::1");
}

#[test]
fn the_first_matching_route_is_selected() {
    let regex = |text: &str| Regex::new(text).unwrap();
    let cookie = HeaderMatch {
        name: "end-user".into(),
        test: HeaderTest::Value(TextMatch::Exact(bytes("jason"))),
        invert: false,
        missing_as_empty: false,
    };
    let query = |value: Option<&str>| QueryMatch {
        name: "q".into(),
        value: value.map(|value| TextMatch::Exact(bytes(value))),
    };
    let mut table = table(&["*"], false);
    Arc::get_mut(&mut table.hosts[0]).unwrap().routes = vec![
        route("never", RouteMatch { fraction: Some(0), ..prefix("/") }),
        route("exact", by_path(PathMatch::Exact(bytes("/exact")))),
        route("case", RouteMatch { case_sensitive: false, ..by_path(PathMatch::Exact(bytes("/Case"))) }),
        route("separated", by_path(PathMatch::SeparatedPrefix(bytes("/sep")))),
        route("regex", by_path(PathMatch::Regex(regex("^(?:/r[0-9]+)$")))),
        route("query", RouteMatch { query: vec![query(Some("1"))], ..prefix("/q") }),
        route("any query", RouteMatch { query: vec![query(None)], ..prefix("/q") }),
        route("grpc", RouteMatch { grpc: true, ..prefix("/svc") }),
        route("header", RouteMatch { headers: vec![cookie], ..prefix("/") }),
        route("rest", prefix("/")),
    ];
    type Case = (&'static str, &'static [(&'static str, &'static str)], &'static str);
    let cases: [Case; 15] = [
        ("/exact", &[], "exact"),
        ("/exact?x=y", &[], "exact"),
        ("/exact/", &[], "rest"),
        ("/cASE", &[], "case"),
        ("/sep", &[], "separated"),
        ("/sep/a", &[], "separated"),
        ("/separate", &[], "rest"),
        ("/r12", &[], "regex"),
        ("/r12/", &[], "rest"),
        ("/q?a=b&q=1", &[], "query"),
        ("/q?q=2", &[], "any query"),
        ("/q?q", &[], "any query"),
        ("/svc/m", &[("content-type", "application/grpc")], "grpc"),
        ("/svc/m", &[("content-type", "text/html")], "rest"),
        ("/", &[("end-user", "jason")], "header"),
    ];
    for (path, headers, expected) in cases {
        let head = RequestHead::build("GET", path, "h", headers);
        assert_eq!(&*find(&table, &head, None, &mut rng()).unwrap().route.name, expected, "{path}");
    }
}

#[test]
fn weights_and_fractions_are_respected() {
    let target = |cluster: &str, weight| Target {
        cluster: cluster.into(),
        weight,
        headers: HeaderOps::default(),
        host: None,
    };
    let targets = [target("v1", 80), target("v0", 0), target("v2", 20)];
    let mut counts: HashMap<&str, u32> = HashMap::new();
    let mut rng = rng();
    for _ in 0..10_000 {
        *counts.entry(&weighted(100, &targets, &mut rng).unwrap().cluster).or_default() += 1;
    }
    assert!((7_800..8_200).contains(&counts["v1"]), "{counts:?}");
    assert!(!counts.contains_key("v0"));
    let taken = (0..10_000).filter(|_| sample(&mut rng, 100_000)).count();
    assert!((850..1_150).contains(&taken), "{taken}");
}

#[test]
fn paths_are_rewritten() {
    let prefix_of = |new: &str| Rewrite::Prefix(new.into());
    let separated = |text: &str| by_path(PathMatch::SeparatedPrefix(bytes(text)));
    let regex = |find: &str, with: &str| Rewrite::Regex(Regex::new(find).unwrap(), with.into());
    let cases = [
        (prefix_of("/new"), prefix("/old"), "/old/a?b=c", "/new/a?b=c"),
        (prefix_of("/"), prefix("/old/"), "/old/a", "/a"),
        (prefix_of("/new"), by_path(PathMatch::Exact(bytes("/old"))), "/old?x", "/new?x"),
        (prefix_of("/"), separated("/old"), "/old/a", "//a"),
        (prefix_of("/"), separated("/old"), "/old", "/"),
        (Rewrite::Full("/all".into()), prefix("/"), "/old/a?b", "/all?b"),
        (regex("^/v([0-9])/(.*)$", "/\\2/\\1\\\\"), prefix("/"), "/v1/a?v2", "/a/1\\?v2"),
        (regex("/x", "/y"), prefix("/"), "/a", "/a"),
        (regex("/a", ""), prefix("/"), "/a?b", ""),
    ];
    for (change, matched, path, expected) in cases {
        assert_eq!(rewrite(&change, &matched, path).unwrap_or_default(), expected, "{change:?}");
    }
}

#[test]
fn locations_are_built_as_in_envoy() {
    let head = |authority, path| RequestHead::build("GET", path, authority, &[]);
    let plain = || Redirect { status: 301, ..Redirect::default() };
    let https = || Redirect { scheme: Some("https".into()), ..plain() };
    let cases = [
        (plain(), head("a:8080", "/b?c"), "http://a:8080/b?c"),
        (https(), head("a:80", "/b?c"), "https://a/b?c"),
        (https(), head("a:8080", "/"), "https://a:8080/"),
        (Redirect { port: Some(443), ..https() }, head("a:80", "/"), "https://a:443/"),
        (Redirect { scheme: Some("http".into()), ..plain() }, head("a:80", "/"), "http://a:80/"),
        (https(), head("[::1]:80", "/"), "https://[::1]/"),
        (Redirect { port: Some(8443), ..https() }, head("a:80", "/"), "https://a:8443/"),
        (Redirect { host: Some("b".into()), ..plain() }, head("a:81", "/"), "http://b/"),
        (
            Redirect { path: Some(RedirectPath::Full("/x?y".into())), ..plain() },
            head("a", "/b?c"),
            "http://a/x?y",
        ),
        (Redirect { strip_query: true, ..plain() }, head("a", "/b?c"), "http://a/b"),
    ];
    for (redirect, head, expected) in cases {
        assert_eq!(location(&redirect, &head, "http"), expected, "{redirect:?}");
    }
    assert_eq!(https_location(&head("a:81", "/b?c")), "https://a:81/b?c");
}

/// Returns the domain that the index must find, by a scan of all domains.
fn scan<'a>(domains: &[&'a str], authority: &str) -> Option<&'a str> {
    let authority = authority.to_ascii_lowercase();
    let exact = domains.iter().find(|domain| **domain == authority && !domain.contains('*'));
    let suffix = |domain: &&&str| {
        let rest = domain.strip_prefix('*').filter(|rest| !rest.is_empty());
        rest.is_some_and(|rest| authority.len() > rest.len() && authority.ends_with(rest))
    };
    let prefix = |domain: &&&str| {
        let rest = domain.strip_suffix('*').filter(|rest| !rest.is_empty());
        rest.is_some_and(|rest| authority.len() > rest.len() && authority.starts_with(rest))
    };
    exact
        .or_else(|| domains.iter().filter(suffix).max_by_key(|domain| domain.len()))
        .or_else(|| domains.iter().filter(prefix).max_by_key(|domain| domain.len()))
        .or_else(|| domains.iter().find(|domain| **domain == "*"))
        .copied()
}

proptest! {
    #[test]
    fn the_index_agrees_with_a_scan(
        authority in "[aAb.]{0,6}(:8)?",
        chosen in proptest::sample::subsequence(
            vec!["a", "b", "a.b", "a:8", "*.a", "*.b", "*a.b", "a.*", "b*", "ab.*", "*"], 0..11),
    ) {
        let table = table(&chosen, false);
        let found = virtual_host(&table, &authority).map(|(host, _)| &*host.name);
        prop_assert_eq!(found, scan(&chosen, &authority));
    }

    #[test]
    fn any_request_is_handled(authority in ".{0,20}", path in ".{0,40}", value in ".{0,10}") {
        let table = table(&["*.a", "a.*", "*"], true);
        let head = RequestHead::build("GET", &path, &authority, &[("x", &value)]);
        let _ = find(&table, &head, None, &mut rng());
        let _ = rewrite(&Rewrite::Prefix("/é".into()), &prefix("/a"), &path);
        let _ = location(&Redirect::default(), &head, "https");
    }
}

#[test]
fn a_table_without_hosts_finds_nothing() {
    assert!(
        find(&RouteTable::default(), &RequestHead::build("GET", "/", "a", &[]), None, &mut rng()).is_err()
    );
}
