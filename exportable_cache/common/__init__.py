"""What every room uses: progress, files, small tools that know nothing of caches."""
