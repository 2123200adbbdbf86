//! Translation of routes.

use super::*;

#[test]
fn domains_are_indexed_and_must_be_unique() {
    let host = |name: &str, domains: &[&str]| VirtualHost {
        name: name.to_owned(),
        domains: domains.iter().map(|&domain| domain.to_owned()).collect(),
        routes: vec![RouteProto {
            r#match: Some(RouteMatch {
                path_specifier: Some(route_match::PathSpecifier::Prefix("/".to_owned())),
                ..RouteMatch::default()
            }),
            action: Some(route::Action::Route(RouteAction {
                cluster_specifier: Some(route_action::ClusterSpecifier::Cluster("c".to_owned())),
                ..RouteAction::default()
            })),
            ..RouteProto::default()
        }],
        ..VirtualHost::default()
    };
    let table = |hosts| {
        let proto = RouteConfiguration { virtual_hosts: hosts, ..RouteConfiguration::default() };
        with(false, |translator| translator.routes(&proto.encode_to_vec()))
    };
    let good = table(vec![host("a", &["A.b", "*.c.d", "*.x.c.d", "w.*"]), host("any", &["*"])]).unwrap();
    assert_eq!((good.exact["a.b"], good.any), (0, Some(1)));
    assert_eq!(good.suffixes.iter().map(|(text, _)| &**text).collect::<Vec<_>>(), [".x.c.d", ".c.d"]);
    assert_eq!(&*good.prefixes[0].0, "w.");
    let reason = table(vec![host("a", &["x"]), host("b", &["X"])]).unwrap_err().to_string();
    assert!(reason.starts_with("virtual_hosts[1].domains:"), "{reason}");
}

#[test]
fn a_rewritten_host_must_be_valid() {
    let table = |host: &str| {
        let action = RouteAction {
            cluster_specifier: Some(route_action::ClusterSpecifier::Cluster("c".to_owned())),
            host_rewrite_specifier: Some(route_action::HostRewriteSpecifier::HostRewriteLiteral(
                host.to_owned(),
            )),
            ..RouteAction::default()
        };
        let route = RouteProto {
            r#match: Some(RouteMatch {
                path_specifier: Some(route_match::PathSpecifier::Prefix("/".to_owned())),
                ..RouteMatch::default()
            }),
            action: Some(route::Action::Route(action)),
            ..RouteProto::default()
        };
        let host = VirtualHost {
            name: "h".to_owned(),
            domains: vec!["*".to_owned()],
            routes: vec![route],
            ..VirtualHost::default()
        };
        let proto = RouteConfiguration { virtual_hosts: vec![host], ..RouteConfiguration::default() };
        with(false, |translator| translator.routes(&proto.encode_to_vec()))
    };
    table("b.example:80").unwrap();
    table("").unwrap();
    for host in ["b c", "b\r\nx: y", "b/c"] {
        let reason = table(host).unwrap_err().to_string();
        let expected = if host.contains('\n') { "contains control characters" } else { "is not a host" };
        assert!(reason.contains("host_rewrite_literal: ") && reason.ends_with(expected), "{reason}");
    }
}
