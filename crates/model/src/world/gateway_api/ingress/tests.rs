use super::*;
use crate::world::gateway_api::tests::apply;

const CLASS: &str = "
apiVersion: networking.k8s.io/v1
kind: IngressClass
metadata: {name: own}
spec: {controller: istio.io/ingress-controller}
---
apiVersion: networking.k8s.io/v1
kind: IngressClass
metadata: {name: other}
spec: {controller: example.com/other}
";

fn ingress(name: &str, head: &str, rules: &str) -> String {
    format!(
        "---\napiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {{name: {name}, namespace: shop{head}}}\n\
         spec: {{{rules}}}\n"
    )
}

/// Returns the rules of an Ingress for one host and path, and a class.
fn rules(class: &str, path: &str) -> String {
    let class = if class.is_empty() { String::new() } else { format!("ingressClassName: {class}, ") };
    format!("{class}rules: [{{host: a.example.com, http: {{paths: [{path}]}}}}]")
}

fn path(kind: &str, path: &str) -> String {
    format!("{{path: '{path}', pathType: {kind}, backend: {{service: {{name: a, port: {{number: 80}}}}}}}}")
}

fn world(text: &str) -> World {
    let mut world = World::new();
    apply(&mut world, &[CLASS, text].concat());
    world
}

fn mesh(settings: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: istio, namespace: istio-system}}\ndata: {{mesh: '{settings}'}}\n"
    )
}

/// Returns the shown names of the internal Gateways, and the values of their selectors.
fn gateways(world: &World) -> Vec<(String, String)> {
    let gateways = world.gateways.iter().map(|entry| &entry.object);
    let shown = gateways
        .map(|of| (super::super::shown_name(&of.meta.name).to_owned(), of.spec.selector[LABEL].clone()));
    shown.collect()
}

#[test]
fn the_class_decides_which_ingresses_are_served() {
    let all = [
        ingress("by-class", "", &rules("own", &path("Prefix", "/"))),
        ingress("of-other", "", &rules("other", &path("Prefix", "/"))),
        ingress("of-unknown", "", &rules("absent", &path("Prefix", "/"))),
        ingress("without", "", &rules("", &path("Prefix", "/"))),
        ingress(
            "annotated",
            ", annotations: {kubernetes.io/ingress.class: istio}",
            &rules("", &path("Prefix", "/")),
        ),
        ingress(
            "other",
            ", annotations: {kubernetes.io/ingress.class: nginx}",
            &rules("own", &path("Prefix", "/")),
        ),
    ]
    .concat();
    let served = |settings: &str| {
        let names = gateways(&world(&[all.as_str(), &mesh(settings)].concat())).into_iter();
        let names = names.map(|(name, _)| name.split("-istio-").next().unwrap().to_owned());
        names.collect::<Vec<_>>()
    };
    assert_eq!(served(""), ["annotated", "by-class"]);
    assert_eq!(served("ingressControllerMode: DEFAULT"), ["annotated", "by-class", "of-unknown", "without"]);
    assert_eq!(served("ingressControllerMode: \"OFF\""), ["by-class"]);
    assert_eq!(served("ingressClass: nginx"), ["by-class", "other"]);
}

#[test]
fn the_mesh_configuration_selects_the_proxies() {
    let text = ingress("a", "", &rules("own", &path("Prefix", "/")));
    let value = |settings: &str| gateways(&world(&[text.as_str(), &mesh(settings)].concat())).remove(0).1;
    assert_eq!(value(""), "ingressgateway");
    assert_eq!(value("ingressService: istio-ingressgateway"), "ingressgateway");
    assert_eq!(value("ingressService: edge"), "edge");
    assert_eq!(value("{ingressService: edge, ingressSelector: front}"), "front");
}

#[test]
fn ports_by_name_follow_their_service() {
    let by_name = "{path: /, pathType: Prefix, backend: {service: {name: a, port: {name: web}}}}";
    let mut world = world(&ingress("a", "", &rules("own", by_name)));
    let ports = |world: &World| {
        let rules = world.virtual_services.iter().flat_map(|entry| entry.object.spec.http.clone());
        rules.map(|rule| rule.route[0].destination.port.unwrap().number).collect::<Vec<_>>()
    };
    assert_eq!(ports(&world), [0; 0]);
    let service = |port: u16| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: a, namespace: shop}}\nspec: {{clusterIP: 10.0.0.1, ports: [{{name: web, port: {port}}}]}}\n"
        )
    };
    for port in [8080, 9090] {
        apply(&mut world, &service(port));
        assert_eq!(ports(&world), [u32::from(port)]);
    }
}

#[test]
fn internal_objects_end_with_their_ingress() {
    let mut world = world(&ingress("a", "", &rules("own", &path("Exact", "/a"))));
    assert_eq!((world.gateways.iter().count(), world.virtual_services.iter().count()), (1, 1));
    let key = ObjectKey { kind: Kind::Ingress, namespace: "shop".into(), name: "a".into() };
    world.take_changes();
    assert!(world.delete(&key));
    let changes = world.take_changes();
    assert!(!changes.everything && !changes.gateways.is_empty(), "{changes:?}");
    assert_eq!((world.gateways.iter().count(), world.virtual_services.iter().count()), (0, 0));
}

#[test]
fn hosts_whose_names_look_alike_have_objects_of_their_own() {
    let hosts =
        "ingressClassName: own, rules: [{host: a.b, http: {paths: [P]}}, {host: a-b, http: {paths: [P]}}]";
    let world = world(&ingress("a", "", &hosts.replace('P', &path("Prefix", "/"))));
    let hosts = world.virtual_services.iter().map(|entry| entry.object.spec.hosts[0].clone());
    assert_eq!(hosts.collect::<Vec<_>>(), ["a-b", "a.b"]);
}

#[test]
fn the_condition_names_the_class_that_is_not_served() {
    let message = |head: &str, class: &str| {
        let world = world(&ingress("one", head, &rules(class, &path("Prefix", "/"))));
        let key = ObjectKey { kind: Kind::Ingress, namespace: "shop".into(), name: "one".into() };
        let conditions = world.cluster_status(&key).conditions;
        conditions.into_iter().map(|of| of.condition.message).next().unwrap()
    };
    assert_eq!(message("", "other"), "IngressClass other has another controller");
    assert_eq!(message("", "absent"), "there is no IngressClass absent");
    // The annotation takes precedence.
    let head = ", annotations: {kubernetes.io/ingress.class: nginx}";
    assert_eq!(message(head, "own"), "the control plane does not serve class nginx of its annotation");
}
