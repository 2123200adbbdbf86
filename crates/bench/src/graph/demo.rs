//! Copies of a microservice demo, as the suite of Kinvolk has them: emojivoto and bookinfo in one application of ten
//! services.
//!
//! The entry point calls each copy with the same probability, so that a request reaches one copy on average, at random. A
//! request to a copy goes to the page of one of both demos.

use anyhow::ensure;

use super::format::MAX_SERVICES;

/// Services of a copy, with the services that each calls and the probability in percent.
const SERVICES: [(&str, &[(&str, u32)]); 10] = [
    ("app", &[("web", 50), ("productpage", 50)]),
    ("web", &[("emoji", 100), ("voting", 100)]),
    ("emoji", &[]),
    ("voting", &[]),
    ("productpage", &[("details", 100), ("reviews-v1", 33), ("reviews-v2", 33), ("reviews-v3", 33)]),
    ("details", &[]),
    ("reviews-v1", &[]),
    ("reviews-v2", &[("ratings", 100)]),
    ("reviews-v3", &[("ratings", 100)]),
    ("ratings", &[]),
];

/// Names of services, each with its callees and their probability in percent.
pub(super) type DemoServices = Vec<(String, Vec<(String, u32)>)>;

/// Returns the entry point and the services of all copies.
///
/// # Errors
/// There is no copy, or the graph would have too many services.
pub(super) fn services(copies: u32) -> anyhow::Result<DemoServices> {
    let most = (MAX_SERVICES - 1) / SERVICES.len();
    ensure!((1..=most).contains(&(copies as usize)), "--copies must be from 1 to {most}");
    let name = |service: &str, copy: u32| format!("{service}-{copy}");
    let share = (100.0 / f64::from(copies)).round().max(1.0) as u32;
    let apps = (1..=copies).map(|copy| (name("app", copy), share)).collect();
    let of_copy = |copy: u32| {
        SERVICES.into_iter().map(move |(service, callees)| {
            let callees = callees.iter().map(|(callee, percent)| (name(callee, copy), *percent)).collect();
            (name(service, copy), callees)
        })
    };
    Ok(std::iter::once(("entry".to_owned(), apps)).chain((1..=copies).flat_map(of_copy)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_share_the_requests_of_the_entry_point() {
        let all = services(4).unwrap();
        assert_eq!(all.len(), 41);
        let (entry, apps) = &all[0];
        assert_eq!(entry, "entry");
        assert_eq!(*apps, [1, 2, 3, 4].map(|copy| (format!("app-{copy}"), 25)));
        let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        assert!(
            all.iter().flat_map(|(_, callees)| callees).all(|(callee, _)| names.contains(&callee.as_str()))
        );
        assert!(services(0).is_err() && services(10_000).is_err());
    }
}
