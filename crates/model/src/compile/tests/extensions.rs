//! Limits of the Lua scripts of a proxy.

use super::*;
use crate::api::extension::MAX_SCRIPTS;

fn extension(namespace: &str, name: &str, script: &str) -> String {
    format!(
        "---\napiVersion: extensions.istio.io/v1alpha1\nkind: TrafficExtension\nmetadata: {{name: {name}, namespace: \
         {namespace}}}\nspec: {{lua: {{inlineCode: \"{script}\"}}}}\n"
    )
}

/// Returns the extensions that are scripts and those in place of which requests are refused, and the objects that
/// validation reports.
fn effects(objects: &str) -> (usize, Vec<String>, Vec<String>) {
    let world = world(objects);
    let (made, _) = compile(&world, &view());
    let manager = configs(&chains(&made, 8080)[0]).into_iter().find_map(unpack::<HttpConnectionManager>);
    let filters = manager.unwrap().http_filters;
    let of_extensions = filters.iter().filter(|filter| filter.name.starts_with("extensions.istio.io/"));
    let (scripts, refused): (Vec<_>, Vec<_>) = of_extensions.partition(|filter| match &filter.config_type {
        Some(ConfigType::TypedConfig(any)) => any.type_url.ends_with("Lua"),
        _ => false,
    });
    let name = |name: &str| name.rsplit(['/', '.']).next().unwrap().to_owned();
    let reported = world.validate().into_iter().filter(|found| found.field == "spec.lua.inlineCode");
    let reported = reported.map(|found| name(&found.object)).collect();
    (scripts.len(), refused.iter().map(|filter| name(&filter.name)).collect(), reported)
}

#[test]
fn the_number_and_the_size_of_scripts_are_limited() {
    let many: String =
        (0..MAX_SCRIPTS).map(|of| extension("shop", &format!("s{of:02}"), &format!("x = {of}"))).collect();
    assert_eq!(effects(&many), (MAX_SCRIPTS, vec![], vec![]));
    let shared = many.clone() + &extension("shop", "z", "x = 0");
    assert_eq!(effects(&shared), (MAX_SCRIPTS + 1, vec![], vec![]), "equal scripts count once");
    let refused = |name: &str| (vec![name.to_owned()], vec![name.to_owned()]);
    let (filters, reported) = refused("z");
    assert_eq!(
        effects(&(many.clone() + &extension("shop", "z", "x = -1"))),
        (MAX_SCRIPTS, filters, reported)
    );
    // A script of the root namespace is not displaced.
    let (filters, reported) = refused("s63");
    assert_eq!(
        effects(&(many + &extension("istio-system", "z", "x = -1"))),
        (MAX_SCRIPTS, filters, reported)
    );

    let long =
        |of: usize| extension("shop", &format!("s{of:02}"), &format!("x = {of} -- {}", "-".repeat(65_000)));
    let (filters, reported) = refused("s16");
    assert_eq!(effects(&(0..17).map(long).collect::<String>()), (16, filters, reported));
}
