"""Bootstrap intervals: how much a figure would vary with other prompts."""
import numpy as np


def interval(figure, *samples, draws=2000):
    """[low, high]: 95 % bootstrap interval of figure(*samples), over prompts. samples: arrays (n, ..) of the
    same n prompts, which are resampled together, so that a difference or ratio of two methods is paired.
    figure must accept arrays with further dimensions in front, (.., n, ..)."""
    n = len(samples[0])
    drawn = np.random.default_rng(0).integers(n, size=(draws, n))
    values = figure(*(np.asarray(x)[drawn] for x in samples))
    return [float(x) for x in np.percentile(values, (2.5, 97.5))]


def with_range(name, figure, *samples):
    """{NAME: figure(*samples), NAME_range: its interval}."""
    return {name: float(figure(*samples)), f"{name}_range": interval(figure, *samples)}
