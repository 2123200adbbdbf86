//! Settings of Criterion that all micro-benchmarks of the crates have. The baseline in `micro.json` was measured with them.

use std::time::Duration;

use criterion::Criterion;

/// Returns the settings, with those of the command line.
pub(crate) fn criterion() -> Criterion {
    let settings = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(1))
        .sample_size(50)
        .nresamples(10_000)
        .without_plots();
    settings.configure_from_args()
}
