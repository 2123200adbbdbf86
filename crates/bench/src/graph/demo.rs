//! Copies of a microservice demo, as the suite of Kinvolk has them: emojivoto and bookinfo in one application of ten
//! services.
//!
//! The entry point calls each copy with the same probability, so that a request reaches one copy on average, at random. A
//! request to a copy goes to the page of one of both demos.

use anyhow::ensure;

use super::{format::MAX_SERVICES, model::CERTAIN};

/// Probability of each of three versions, in percent.
const THIRD: f64 = 33.333_333;
/// Services of a copy, with the services that each calls and the probability in percent.
const SERVICES: [(&str, &[(&str, f64)]); 10] = [
    ("app", &[("web", 50.0), ("productpage", 50.0)]),
    ("web", &[("emoji", CERTAIN), ("voting", CERTAIN)]),
    ("emoji", &[]),
    ("voting", &[]),
    (
        "productpage",
        &[("details", CERTAIN), ("reviews-v1", THIRD), ("reviews-v2", THIRD), ("reviews-v3", THIRD)],
    ),
    ("details", &[]),
    ("reviews-v1", &[]),
    ("reviews-v2", &[("ratings", CERTAIN)]),
    ("reviews-v3", &[("ratings", CERTAIN)]),
    ("ratings", &[]),
];

/// Names of services, each with its callees and their probability in percent.
pub(super) type DemoServices = Vec<(String, Vec<(String, f64)>)>;

/// Returns the entry point and the services of all copies.
///
/// # Errors
/// There is no copy, or the graph would have too many services.
pub(super) fn services(copies: u32) -> anyhow::Result<DemoServices> {
    let most = (MAX_SERVICES - 1) / SERVICES.len();
    ensure!((1..=most).contains(&(copies as usize)), "--copies must be from 1 to {most}");
    let name = |service: &str, copy: u32| format!("{service}-{copy}");
    let share = share_of(copies);
    let apps = (1..=copies).map(|copy| (name("app", copy), share)).collect();
    let of_copy = |copy: u32| {
        SERVICES.into_iter().map(move |(service, callees)| {
            let callees = callees.iter().map(|(callee, percent)| (name(callee, copy), *percent)).collect();
            (name(service, copy), callees)
        })
    };
    Ok(std::iter::once(("entry".to_owned(), apps)).chain((1..=copies).flat_map(of_copy)).collect())
}

/// Returns the probability of one of so many alternatives in percent, with six decimals.
fn share_of(number: u32) -> f64 {
    const DECIMALS: f64 = 1e6;
    (CERTAIN / f64::from(number) * DECIMALS).round() / DECIMALS
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
        assert_eq!(*apps, [1, 2, 3, 4].map(|copy| (format!("app-{copy}"), 25.0)));
        let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        assert!(
            all.iter().flat_map(|(_, callees)| callees).all(|(callee, _)| names.contains(&callee.as_str()))
        );
        // The mean number of copies that a request reaches is one for each number of copies.
        for copies in [3, 7, 15, 30, 300] {
            let (_, apps) = &services(copies).unwrap()[0];
            let copies: f64 = apps.iter().map(|(_, share)| share / CERTAIN).sum();
            assert!((copies - 1.0).abs() < 1e-5, "{copies}");
        }
        assert!(services(0).is_err() && services(10_000).is_err());
    }
}
