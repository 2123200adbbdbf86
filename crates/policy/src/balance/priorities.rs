//! Distribution of the load over priorities, by their health. All numbers are whole percentages, as in Envoy, so that
//! the shares are the same.

/// Number of endpoints of a priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointCounts {
    /// All endpoints.
    pub all: usize,
    /// Endpoints that are not draining.
    pub counted: usize,
    /// Healthy endpoints.
    pub healthy: usize,
    /// Degraded endpoints.
    pub degraded: usize,
}

impl EndpointCounts {
    /// Returns how much of the load the healthy and the degraded endpoints can carry, in percent.
    pub(super) fn percentages(&self, overprovisioning: usize) -> [usize; 2] {
        [self.healthy, self.degraded].map(|part| match self.counted {
            0 => 0,
            counted => (overprovisioning * part / counted).min(100),
        })
    }
}

/// Share of a priority in the load, in percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Share of its healthy endpoints.
    pub healthy: usize,
    /// Share of its degraded endpoints.
    pub degraded: usize,
    /// Panic: too few endpoints are available, so that all of them are used.
    pub panic: bool,
}

/// Returns the shares of all priorities. `overprovisioning` and `panic_threshold` are in percent.
pub fn loads(priorities: &[EndpointCounts], overprovisioning: usize, panic_threshold: usize) -> Vec<Load> {
    let percentages = || priorities.iter().map(|census| census.percentages(overprovisioning));
    let healthy: Vec<_> = percentages().map(|[healthy, _]| healthy).collect();
    let degraded: Vec<_> = percentages().map(|[_, degraded]| degraded).collect();
    let available = (healthy.iter().sum::<usize>() + degraded.iter().sum::<usize>()).min(100);
    let mut loads = vec![Load::default(); priorities.len()];
    if available > 0 {
        let mut left = 100;
        let mut take = |part: usize| {
            let taken = (part * 100 / available).min(left);
            left -= taken;
            taken
        };
        for (load, part) in loads.iter_mut().zip(&healthy) {
            load.healthy = take(*part);
        }
        for (load, part) in loads.iter_mut().zip(&degraded) {
            load.degraded = take(*part);
        }
        // The rest from rounding.
        if let Some(first) = healthy.iter().position(|part| *part > 0) {
            loads[first].healthy += left;
        } else if let Some(first) = degraded.iter().position(|part| *part > 0) {
            loads[first].degraded += left;
        }
    }
    // There is no panic while the priorities together can carry the whole load.
    if available < 100 {
        for (load, census) in loads.iter_mut().zip(priorities) {
            let good = 100 * (census.healthy + census.degraded);
            load.panic = good < panic_threshold.min(100) * census.counted.max(1);
        }
        if loads.iter().all(|load| load.panic) {
            by_number(priorities, &mut loads);
        }
    }
    loads
}

/// Distributes the load by the number of endpoints, for the case that all priorities are in panic.
fn by_number(priorities: &[EndpointCounts], loads: &mut [Load]) {
    let total: usize = priorities.iter().map(|census| census.all).sum();
    let Some(first) = priorities.iter().position(|census| census.all > 0) else { return };
    let mut left = 100;
    for (load, census) in loads.iter_mut().zip(priorities) {
        (load.healthy, load.degraded) = (100 * census.all / total, 0);
        left -= load.healthy;
    }
    loads[first].healthy += left;
}
