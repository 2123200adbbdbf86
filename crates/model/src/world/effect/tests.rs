use super::*;
use crate::files::Files;

/// Two workloads with sidecars, and one without.
const WORKLOADS: &str = "
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web, security.istio.io/tlsMode: istio}}
spec: {containers: [{name: web, image: web}]}
---
apiVersion: v1
kind: Pod
metadata: {name: api, namespace: shop, labels: {app: api, security.istio.io/tlsMode: istio}}
spec: {containers: [{name: api, image: api}]}
---
apiVersion: v1
kind: Pod
metadata: {name: bare, namespace: shop, labels: {app: bare}}
spec: {containers: [{name: bare, image: bare}]}
";

const OF_SHOP: &str = "workloads of namespace shop";
const OF_WEB: &str = "workloads of namespace shop with the labels app: web";
const WEB: &str = "selector: {matchLabels: {app: web}}, ";

fn policy(name: &str, spec: &str) -> String {
    object("security.istio.io/v1", "AuthorizationPolicy", name, "shop", spec)
}

fn mutual_tls(namespace: &str, spec: &str) -> String {
    object("security.istio.io/v1", "PeerAuthentication", "default", namespace, spec)
}

fn object(version: &str, kind: &str, name: &str, namespace: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: {version}\nkind: {kind}\nmetadata: {{name: {name}, namespace: {namespace}}}\nspec: {spec}\n"
    )
}

/// Returns the effects of a file's change, in the order of the objects, in a World with other objects.
fn effects(there: &str, before: &str, after: &str) -> Vec<Effect> {
    let (mut world, mut files) = (World::new(), Files::new());
    for (path, text) in [("a", format!("{WORKLOADS}{there}")), ("b", before.to_owned())] {
        for change in files.set(0, path, &text) {
            change.apply_to(&mut world);
        }
    }
    let policies = world.policies();
    let mut changed = Vec::new();
    for change in files.set(0, "b", after) {
        let key = change.key();
        let object = world.effective(&key).map(|(object, _)| object);
        if change.apply_to(&mut world) {
            changed.push((key, object));
        }
    }
    let findings = world.validate();
    let effects = Effects::new(&policies, &world, &findings);
    changed.iter().filter_map(|(key, before)| effects.of(key, before.as_ref())).collect()
}

/// Returns the texts that follow the selected workloads.
fn texts(there: &str, before: &str, after: &str) -> Vec<String> {
    let effects = effects(there, before, after);
    effects.iter().flat_map(|effect| effect.text.split("; ").skip(1)).map(ToOwned::to_owned).collect()
}

#[test]
fn removed_mutual_tls_is_reported_by_workload_and_port() {
    let strict = "{mtls: {mode: STRICT}}";
    let [namespace, mesh] = ["shop", "istio-system"].map(|of| mutual_tls(of, strict));
    let accepted = "connections without mutual TLS are accepted now";
    for (before, after) in [("STRICT", "PERMISSIVE"), ("STRICT", "DISABLE"), ("STRICT", "UNSET")] {
        for of in ["shop", "istio-system"] {
            let [before, after] =
                [before, after].map(|mode| mutual_tls(of, &format!("{{mtls: {{mode: {mode}}}}}")));
            assert_eq!(texts("", &before, &after), [format!("{accepted} by shop/api, shop/web")]);
        }
    }
    assert_eq!(texts("", &namespace, ""), [format!("{accepted} by shop/api, shop/web")]);
    assert_eq!(texts(&mesh, &namespace, ""), [""; 0], "the mesh requires it");
    assert_eq!(
        texts("", "", &mesh),
        ["connections without mutual TLS are refused now by shop/api, shop/web"]
    );
    let ports = |ports: &str| format!("{{{WEB}mtls: {{mode: STRICT}}, portLevelMtls: {{{ports}}}}}");
    let [all, but_one, others] = [
        "8081: {mode: STRICT}",
        "8080: {mode: PERMISSIVE}",
        "8080: {mode: DISABLE}, 8081: {mode: PERMISSIVE}",
    ]
    .map(|text| mutual_tls("shop", &ports(text)));
    assert_eq!(texts("", &all, &but_one), [format!("{accepted} on port 8080 by shop/web")]);
    assert_eq!(texts("", &all, &others), [format!("{accepted} on ports 8080, 8081 by shop/web")]);
    let open = format!("{{{WEB}mtls: {{mode: PERMISSIVE}}, portLevelMtls: {{8081: {{mode: STRICT}}}}}}");
    let open = mutual_tls("shop", &open);
    assert_eq!(texts("", &all, &open), [format!("{accepted} on all ports but 8081 by shop/web")]);
    let refused = "connections without mutual TLS are refused now";
    assert_eq!(texts("", &open, &but_one), [format!("{refused} on all ports but 8080 by shop/web")]);
    // A selector that no longer matches a workload.
    let [web, none] = ["web", "nobody"].map(|app| {
        mutual_tls("shop", &format!("{{selector: {{matchLabels: {{app: {app}}}}}, mtls: {{mode: STRICT}}}}"))
    });
    assert_eq!(texts("", &web, &none), [format!("{accepted} by shop/web")]);
}

#[test]
fn a_deny_policy_reports_requests_that_it_no_longer_denies() {
    let deny = |rules: &str| policy("deny", &format!("{{{WEB}action: DENY, rules: [{rules}]}}"));
    let rule = |path: &str| format!("{{to: [{{operation: {{paths: [{path}]}}}}]}}");
    let (a, b, c) = (rule("/a"), rule("/b"), rule("/c"));
    let all = deny(&format!("{a}, {b}, {c}"));
    let removed = "requests that this policy denied are accepted now by shop/web unless a policy denies them";
    let fewer = "requests that the former version of this policy denied are accepted now by shop/web unless a policy denies them";
    let more = "requests that the new version of this policy denies are denied now by shop/web";
    let added = "requests that this policy denies are denied now by shop/web";
    assert_eq!(effects("", "", &all)[0].text, format!("{OF_WEB}; {added}"));
    assert_eq!(texts("", &all, ""), [removed]);
    assert_eq!(texts("", &all, &deny(&b)), [format!("{fewer}: 2 rules were removed")]);
    assert_eq!(texts("", &all, &deny("")), [fewer]);
    assert_eq!(texts("", &deny(&b), &all), [more]);
    assert_eq!(texts("", &deny(&a), &deny(&b)), [fewer, more]);
    assert_eq!(texts("", &deny(&rule("/a/b")), &deny(&rule("/a/*"))), [more], "it was widened");
    assert_eq!(texts("", &deny(&rule("/a/*")), &deny(&rule("/a/b"))), [fewer], "it was narrowed");
    assert_eq!(
        texts("", &deny(&a), &deny(&format!("{{from: [{{source: {{namespaces: [x]}}}}], {}", &a[1..]))),
        [fewer]
    );
    // Another selector.
    let api = all.replace("app: web", "app: api");
    assert_eq!(texts("", &all, &api), [removed.to_owned(), added.replace("web", "api")]);
    // A policy that denies nothing has no text.
    assert_eq!(texts("", &deny(""), ""), [""; 0]);
    assert_eq!(texts("", &all.replace("app: web", "app: bare"), ""), [""; 0]);
    assert_eq!(texts("", &all.replace("DENY", "AUDIT"), ""), [""; 0]);
}

#[test]
fn an_allow_policy_reports_newly_allowed_and_denied_requests() {
    let allow = |name: &str, rules: &str| policy(name, &format!("{{{WEB}rules: [{rules}]}}"));
    let rule = |path: &str| format!("{{to: [{{operation: {{paths: [{path}]}}}}]}}");
    let (one, other) = (allow("one", &rule("/a")), allow("other", &rule("/b")));
    let open = "every request is accepted now by shop/web unless a policy denies it: no ALLOW policy is left";
    assert_eq!(texts("", &one, ""), [open]);
    assert_eq!(texts("", "", &one), ["requests that no ALLOW policy allows are denied now by shop/web"]);
    let removed = "requests that this policy allowed are denied now by shop/web unless a policy allows them";
    assert_eq!(texts(&other, &one, ""), [removed]);
    let added = "requests that this policy allows are accepted now by shop/web unless a policy denies them";
    assert_eq!(texts(&other, "", &one), [added]);
    let wider = allow("one", &format!("{}, {}", rule("/a"), rule("/c")));
    let more = "requests that the new version of this policy allows are accepted now by shop/web unless a policy denies them";
    let fewer = "requests that the former version of this policy allowed are denied now by shop/web unless a policy allows them";
    assert_eq!(texts("", &one, &wider), [more]);
    assert_eq!(texts("", &wider, &one), [fewer]);
    // Removing both leaves nothing.
    assert_eq!(texts("", &format!("{one}{other}"), ""), [open, open]);
    // From ALLOW to DENY.
    let deny = one.replace("rules", "action: DENY, rules");
    let denied = "requests that the new version of this policy denies are denied now by shop/web";
    assert_eq!(texts("", &one, &deny), [open, denied]);
}

#[test]
fn an_object_without_effect_is_not_in_force() {
    let strict = "{mtls: {mode: STRICT}}";
    let older = object("security.istio.io/v1", "PeerAuthentication", "older", "shop", strict);
    assert_eq!(effects(&older, "", &mutual_tls("shop", "{mtls: {mode: DISABLE}}")), []);
    let narrow = format!("{{{WEB}mtls: {{mode: STRICT}}}}");
    let found = effects("", &mutual_tls("istio-system", strict), &mutual_tls("istio-system", &narrow));
    let text = "connections without mutual TLS are accepted now by shop/api, shop/web";
    assert_eq!(found, [Effect { is_in_force: false, text: text.to_owned() }]);
    let routes = |name: &str, hosts: &str| {
        let spec = format!("{{hosts: [{hosts}], http: [{{route: [{{destination: {{host: web}}}}]}}]}}");
        object("networking.istio.io/v1", "VirtualService", name, "shop", &spec)
    };
    let text = "requests to b.shop.svc.cluster.local".to_owned();
    let found = effects(&routes("older", "a"), "", &routes("newer", "a, b"));
    assert_eq!(found, [Effect { is_in_force: true, text }]);
    assert_eq!(effects(&routes("older", "a"), "", &routes("newer", "a")), []);
}

#[test]
fn an_unchanged_object_has_no_effect() {
    let deny = policy("deny", "{action: DENY, rules: [{}]}");
    let strict = mutual_tls("shop", "{mtls: {mode: STRICT}}");
    let found = effects(
        "",
        &format!("{deny}{strict}"),
        &format!("# moved\n{strict}{}", deny.replace("{}]", "{}, {}]")),
    );
    assert_eq!(found, [Effect { is_in_force: true, text: OF_SHOP.to_owned() }]);
}

#[test]
fn a_routing_rule_reports_its_hosts() {
    let rules = "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: v, namespace: shop}\nspec: {hosts: [a, b, c.example.com, d], http: [{route: [{destination: {host: web}}]}]}\n---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {name: r, namespace: shop}\nspec: {host: web}\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: shop}\nspec: {containers: [{name: c, image: i}]}\n";
    let mut added: Vec<String> = effects("", "", rules).into_iter().map(|effect| effect.text).collect();
    added.sort();
    let domain = "shop.svc.cluster.local";
    let expected = [
        format!("connections to web.{domain}"),
        format!("requests to a.{domain}, b.{domain}, c.example.com and 1 more"),
    ];
    assert_eq!(added, expected);
}
