//! Routing: the route is the first that matches, and a rewritten path is a valid path.

use std::{collections::HashMap, sync::LazyLock};

use skysail_http::{
    head::RequestHead,
    http1::{HeadLimits, parse},
};
use skysail_policy::{
    config::{
        RouteTable,
        route::{
            Action, HeaderOps, PathMatch, QueryMatch, Redirect, RedirectPath, Rewrite, Route, RouteMatch,
            VirtualHost,
        },
        text::{HeaderMatch, HeaderTest},
    },
    route::{find, location, rewrite},
};

static TABLE: LazyLock<RouteTable> = LazyLock::new(table);

/// Routes an HTTP/1.1 request head.
pub fn route(data: &[u8]) {
    let (mut head, limits) =
        (RequestHead::default(), HeadLimits { max_head: 4096, max_headers: 20, keep_case: false });
    if parse::request(data, &limits, &mut head).is_err() {
        return;
    }
    let host = virtual_host(head.authority());
    let mut rng = fastrand::Rng::with_seed(1);
    let Ok(found) = find(&TABLE, &head, None, &mut rng) else {
        assert!(host.routes.iter().all(|route| !holds(&route.matches, &head)), "{head:?}");
        return;
    };
    assert_eq!(found.host.name, host.name, "{head:?}");
    let first = host.routes.iter().find(|route| holds(&route.matches, &head));
    assert_eq!(first.map(|route| &*route.name), Some(&*found.route.name), "{head:?}");
    if head.path().starts_with('/') {
        for with in ["/new", "/", "/new/"] {
            let new = rewrite(&Rewrite::Prefix(with.into()), &found.route.matches, head.path());
            assert!(new.is_none_or(|new| new.starts_with('/')), "{head:?}");
        }
    }
    let Action::Redirect(redirect) = &found.route.action else { return };
    let location = location(redirect, &head, "http");
    assert!(location.starts_with("https://"), "{location:?}");
    assert!(!location.bytes().any(|b| b <= b' ' || b == 0x7f), "{location:?}");
}

/// Finds the virtual host of an authority by examining all of them.
fn virtual_host(authority: &str) -> &'static VirtualHost {
    let authority = authority.to_ascii_lowercase();
    let longer = |part: &str| authority.len() > part.len();
    let name = match &*authority {
        "a" | "a:80" => "exact",
        other if other.ends_with("-x.b") && longer("-x.b") => "long suffix",
        other if other.ends_with(".b") && longer(".b") => "suffix",
        other if other.starts_with("c.") && longer("c.") => "prefix",
        _ => "any",
    };
    let host = TABLE.hosts.iter().find(|host| &*host.name == name);
    host.unwrap_or_else(|| panic!("no host {name}"))
}

/// Evaluates a route match with a simple reference implementation.
fn holds(matches: &RouteMatch, head: &RequestHead) -> bool {
    let path = head.path_without_query();
    let (path, folded) = (path.as_bytes(), path.to_ascii_lowercase().into_bytes());
    let path = if matches.case_sensitive { path } else { &folded };
    let by_path = match &matches.path {
        PathMatch::Connect => head.method() == "CONNECT",
        _ if head.method() == "CONNECT" => false,
        PathMatch::Exact(whole) => path == &**whole,
        PathMatch::Prefix(start) => path.starts_with(start),
        PathMatch::SeparatedPrefix(start) => {
            path.strip_prefix(&**start).is_some_and(|rest| matches!(rest.first(), None | Some(b'/')))
        }
        PathMatch::Regex(_) | PathMatch::Template(_) => false,
    };
    let by_query = matches.query.is_empty()
        || head.query().is_some_and(|query| query.split('&').any(|pair| pair.split('=').next() == Some("q")));
    by_path && by_query && (matches.headers.is_empty() || head.has("x-here"))
}

fn table() -> RouteTable {
    let host = |name: &str| VirtualHost {
        name: name.into(),
        routes: routes(),
        headers: HeaderOps::default(),
        include_attempt_count: false,
        require_tls: false,
        limits: vec![],
        used: Default::default(),
    };
    RouteTable {
        checks_clusters: false,
        name: "table".into(),
        hosts: ["exact", "long suffix", "suffix", "prefix", "any"].map(|name| host(name).into()).into(),
        exact: HashMap::from_iter([("a".into(), 0), ("a:80".into(), 0)]),
        suffixes: vec![("-x.b".into(), 1), (".b".into(), 2)],
        prefixes: vec![("c.".into(), 3)],
        any: Some(4),
        ignore_port: false,
        headers: HeaderOps::default(),
        has_vhds: false,
        demand: None,
        takes_unanswered: false,
    }
}

fn routes() -> Vec<Route> {
    let matches = |path| RouteMatch {
        path,
        case_sensitive: true,
        headers: vec![],
        query: vec![],
        grpc: false,
        metadata: Box::default(),
        fraction: None,
    };
    let here = HeaderMatch {
        name: "x-here".into(),
        test: HeaderTest::Present(true),
        invert: false,
        missing_as_empty: false,
    };
    let query = QueryMatch { name: "q".into(), value: None };
    let all = [
        ("connect", matches(PathMatch::Connect)),
        ("exact", matches(PathMatch::Exact((*b"/exact").into()))),
        ("header", RouteMatch { headers: vec![here], ..matches(PathMatch::Prefix((*b"/h").into())) }),
        ("query", RouteMatch { query: vec![query], ..matches(PathMatch::Prefix((*b"/").into())) }),
        ("separated", matches(PathMatch::SeparatedPrefix((*b"/sep").into()))),
        ("folded", RouteMatch { case_sensitive: false, ..matches(PathMatch::Prefix((*b"/fold").into())) }),
        ("prefix", matches(PathMatch::Prefix((*b"/p").into()))),
    ];
    let path = || Some(RedirectPath::Rewritten(Rewrite::Prefix("/new".into())));
    let redirect =
        || Redirect { scheme: Some("https".into()), path: path(), status: 301, ..Redirect::default() };
    let route = |(name, matches): (&str, RouteMatch)| Route {
        name: name.into(),
        matches,
        action: Action::Redirect(redirect()),
        headers: HeaderOps::default(),
        filters: vec![],
        metadata: None,
        decorator: None,
        tracing: None,
        stat_prefix: None,
    };
    all.map(route).into()
}
