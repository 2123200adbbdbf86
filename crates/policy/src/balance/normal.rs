//! Weights of a priority's endpoints, normalised to a sum of 1, for hashing balancers.

use crate::config::{Endpoint, Endpoints};

/// Endpoints with their normalised weights.
pub(super) struct Normal(pub(super) Vec<WeightedEndpoint>);

pub(super) struct WeightedEndpoint {
    /// Address, which the endpoint's place in the tables depends on.
    pub(super) address: String,
    /// Index into the endpoints of the priority.
    pub(super) index: u32,
    pub(super) weight: f64,
}

impl Normal {
    /// Returns the endpoints of a priority that `take` accepts. If localities are `weighed`, each locality has its
    /// share, whatever its number of endpoints.
    pub(super) fn new(
        endpoints: &Endpoints,
        priority: &[std::sync::Arc<Endpoint>],
        weighed: bool,
        take: impl Fn(&Endpoint) -> bool,
    ) -> Self {
        let members = || priority.iter().zip(0_u32..).filter(|(one, _)| take(one));
        let sum = |of: &dyn Fn(&Endpoint) -> bool| -> f64 {
            members().filter(|(one, _)| of(one)).map(|(one, _)| f64::from(one.weight)).sum()
        };
        let mut shares: Vec<(u32, f64, f64)> = Vec::new();
        if weighed {
            let share =
                |locality: u32| endpoints.localities.get(locality as usize).map_or(0, |known| known.weight);
            for one in priority {
                if shares.iter().all(|known| known.0 != one.locality) {
                    let own = sum(&|other| other.locality == one.locality);
                    shares.push((one.locality, share(one.locality).into(), own));
                }
            }
        }
        let total: f64 = shares.iter().map(|(_, share, _)| share).sum();
        let all = if total > 0.0 { 0.0 } else { sum(&|_| true) };
        let weight = |one: &Endpoint| {
            let own = f64::from(one.weight);
            if total > 0.0 {
                let share = shares.iter().find(|known| known.0 == one.locality);
                share.map_or(0.0, |(_, share, sum)| own * (share / total) / sum)
            } else {
                own / all
            }
        };
        let one = |(one, index): (&std::sync::Arc<Endpoint>, u32)| WeightedEndpoint {
            address: one.place().to_string(),
            index,
            weight: weight(one),
        };
        Self(members().map(one).filter(|one| one.weight > 0.0).collect())
    }

    pub(super) fn min(&self) -> f64 {
        self.0.iter().map(|one| one.weight).fold(1.0, f64::min)
    }

    pub(super) fn max(&self) -> f64 {
        self.0.iter().map(|one| one.weight).fold(0.0, f64::max)
    }
}
