"""`tfdp bench memory`: what each replica holds, beside what formulas say."""
